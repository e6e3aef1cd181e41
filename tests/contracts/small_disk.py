"""A program that trains on two ranks with states on a disk that is too small; run in a process of its own."""

from __future__ import annotations

import json
import os
import sys

from lightning_zero.config import Offload
from lightning_zero.lightning.strategy import ZeroStrategy
from tests import worlds
from tests.lightning_programs import Net, loader, seeded, trainer


def fit(rank: int, world: int, path: str, width: int, checkpoint: str | None) -> str:
    """Return how the fit ended; ``checkpoint`` is what it resumes from."""
    fitted = trainer(rank, world, ZeroStrategy(stage=3, offload=Offload(optimizer="nvme", path=path)), max_epochs=2)
    try:
        fitted.fit(seeded(lambda: Net(width)), loader(rank, world), ckpt_path=checkpoint)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


if __name__ == "__main__":
    ends = worlds.run(fit, 2, sys.argv[1], int(sys.argv[2]), *(sys.argv[3:] or [None]))
    print(json.dumps({"ends": ends, "files": os.listdir(sys.argv[1])}))
