"""What most responses say is one tensor for all of them, and what is told of the others stays theirs."""

from __future__ import annotations

import numpy as np

from tests.triton.fake_pb_utils import Sender
from triton_omni.pipeline.events import OmniEvent
from triton_omni.pipeline.stages import CodesEvent, ThinkerEvent
from triton_omni.triton import omni_wire, talker_wire, thinker_wire
from triton_omni.triton.responder import Responder
from triton_omni.triton.tensors import arrays

CODES = np.zeros((2, 16), np.int32)


def test_a_text_delta_shares_what_it_does_not_bring() -> None:
    (first,), (second,) = (omni_wire.event_tensors([OmniEvent(text=text)]) for text in ("one", "two"))
    assert first[0] is not second[0] and first[1:] == second[1:]
    assert [tensor.as_numpy().tolist() for tensor in second] == [[b"two"], [], [b"{}"]]
    assert second[1].as_numpy().dtype == np.int16


def test_audio_and_events_are_their_own() -> None:
    audio = OmniEvent(audio=np.array([1, 2], np.int16))
    end = OmniEvent(info={"type": "end"})
    (sound,), (last,) = omni_wire.event_tensors([audio]), omni_wire.event_tensors([end])
    assert [tensor.as_numpy().tolist() for tensor in sound] == [[b""], [1, 2], [b"{}"]]
    assert [tensor.as_numpy().tolist() for tensor in last] == [[b""], [], [b'{"type":"end"}']]


def test_stages_share_the_reason_that_is_none_yet() -> None:
    ids = ThinkerEvent(token_ids=np.array([7], np.int32), text="a")
    (*_, one), (*_, end) = (thinker_wire.event_tensors([e])[0] for e in (ids, ThinkerEvent(finish_reason="stop")))
    (_, codes), (_, more) = talker_wire.codes_tensors([CodesEvent(CODES), CodesEvent(CODES)])
    assert one is codes is more
    assert arrays([one])["FINISH_REASON"].tolist() == [b""] and arrays([end])["FINISH_REASON"].tolist() == [b"stop"]


def test_they_go_with_the_responder() -> None:
    before = omni_wire.event_tensors([OmniEvent(text="one")])[0]
    responder = Responder("closing", poll_s=1)
    request = Sender()
    responder.open(request, omni_wire.event_tensors, is_last=lambda event: event.is_end).send(final=True)
    responder.close()
    assert request.finished.is_set()
    after = omni_wire.event_tensors([OmniEvent(text="one")])[0]
    assert all(old is not new for old, new in zip(before, after, strict=True))
