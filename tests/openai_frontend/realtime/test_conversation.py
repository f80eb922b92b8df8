"""What is remembered of a conversation."""

from __future__ import annotations

import numpy as np
import pytest

from openai_frontend.realtime.conversation import Conversation, Item, Part, messages
from triton_omni.errors import InvalidRequestError, NotFoundError


@pytest.mark.parametrize(
    ("heard_ms", "said"),
    [
        (None, "one two three four"),
        (1_000, "one two three four"),
        (500, "one two"),
        (390, "one two"),
        (100, "o"),
        (0, ""),
    ],
)
def test_a_transcript_ends_where_the_listener_stopped(heard_ms, said):
    assert Part("output_audio", "one two three four", audio_ms=1_000, heard_ms=heard_ms).heard_text == said


def test_an_answer_that_nobody_heard_is_no_message():
    items = [
        Item("a", "user", [Part("input_text", "Look:"), Part("input_image", image=b"png")]),
        Item("b", "assistant", [Part("output_audio", "Never mind", audio_ms=100, heard_ms=0)]),
        Item("c", "user", [Part("input_audio", samples=np.zeros(160, np.int16))]),
    ]
    told, media = messages(items, "")
    assert [message["role"] for message in told] == ["user", "user"]
    assert told[0]["content"] == [{"type": "text", "text": "Look:"}, {"type": "image", "media": 0}]
    assert told[1]["content"] == [{"type": "audio", "media": 1}]
    assert (media[0], media[1][:4], len(media[1])) == (b"png", b"RIFF", 44 + 320)


def test_items_have_an_order_and_one_id_each():
    conversation = Conversation(1_000)
    assert conversation.add(Item("a", "user", [])) is None
    assert conversation.add(Item("c", "user", [])) == "a"
    assert conversation.add(Item("b", "user", []), "a") == "a"
    assert conversation.add(Item("0", "user", []), "root") is None
    assert [item.id for item in conversation.items] == ["0", "a", "b", "c"]
    with pytest.raises(InvalidRequestError, match="taken"):
        conversation.add(Item("a", "user", []))
    with pytest.raises(NotFoundError, match="no item"):
        conversation.add(Item("d", "user", []), "x")
