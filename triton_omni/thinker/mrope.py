"""M-RoPE positions of a prompt from its expanded ids and the grids of its images and videos."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from triton_omni.pipeline.stages import Int32

Grid = tuple[int, int, int]  # time, height, width, in patches


@dataclasses.dataclass(frozen=True, slots=True)
class MRope:
    """transformers' ``get_rope_index`` for one prompt, also where the sound of a video lies between its frames.

    Text and audio count one by one, the same in all three rows. The pads of an image or video are placed on their
    grid, time scaled to ``position_id_per_seconds``; sound inside a video counts from the video's start. What follows
    counts on from the largest position so far.
    """

    image_token_id: int
    video_token_id: int
    audio_token_id: int
    spatial_merge_size: int
    position_id_per_seconds: int

    @classmethod
    def of(cls, thinker: Mapping[str, Any]) -> MRope:
        """From config.json's ``thinker_config``."""
        return cls(
            image_token_id=int(thinker["image_token_id"]),
            video_token_id=int(thinker["video_token_id"]),
            audio_token_id=int(thinker["audio_token_id"]),
            spatial_merge_size=int(thinker["vision_config"]["spatial_merge_size"]),
            position_id_per_seconds=int(thinker["position_id_per_seconds"]),
        )

    @property
    def media_ids(self) -> tuple[int, int, int]:
        return self.audio_token_id, self.image_token_id, self.video_token_id

    def positions(
        self, token_ids: npt.ArrayLike, images: Sequence[Grid], videos: Sequence[tuple[Grid, float]]
    ) -> Int32:
        """int32 [3, P] for ``token_ids`` [P]; ``videos`` with the seconds between two steps of their grid's time.

        Raises ValueError when pads and grids do not agree.
        """
        ids = np.asarray(token_ids)
        positions = np.empty((3, len(ids)), np.int32)
        grids = {
            self.image_token_id: iter([self._grid(grid, 1.0) for grid in images]),
            self.video_token_id: iter([self._grid(grid, step_s) for grid, step_s in videos]),
        }
        done, next_position = 0, 0
        for start, end in self._vision_runs(ids):
            positions[:, done:start] = next_position + np.arange(start - done)
            next_position += start - done
            run = ids[start:end]
            kind = self.video_token_id if self.video_token_id in run else self.image_token_id
            pads, placed = run == kind, next(grids[kind], None)
            if placed is None or placed.shape[1] != pads.sum():
                raise ValueError(f"{pads.sum()} pads at {start} do not fit their grid")
            positions[:, start:end][:, pads] = next_position + placed
            positions[:, start:end][:, ~pads] = next_position + np.arange(len(run) - pads.sum())
            done, next_position = end, int(positions[:, start:end].max()) + 1
        positions[:, done:] = next_position + np.arange(len(ids) - done)
        return positions

    def _vision_runs(self, ids: npt.NDArray[Any]) -> list[tuple[int, int]]:
        """[start, end) of each image and video; a video's run holds the pads of its sound too."""
        media = np.isin(ids, self.media_ids)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], media, [False]]).astype(np.int8)))
        runs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        return [(start, end) for start, end in runs if (ids[start:end] != self.audio_token_id).any()]

    def _grid(self, grid: Grid, step_s: float) -> npt.NDArray[np.int64]:
        """[3, pads], from 0."""
        frames, height, width = grid
        merge = self.spatial_merge_size
        placed = np.indices((frames, height // merge, width // merge)).reshape(3, -1)
        placed[0] = (placed[0] * step_s * self.position_id_per_seconds).astype(np.int64)
        return placed
