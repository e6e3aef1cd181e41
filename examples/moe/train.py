"""Train a mixture of experts on the text of the Python standard library, or the dense model of the same cost.

    python examples/moe/train.py fit --config examples/moe/dense.yaml
    python examples/moe/train.py fit --config examples/moe/sparse.yaml
    python examples/moe/curves.py runs/moe-dense runs/moe-sparse curves.png

Both models make as many operations per token and see the same batches; ``docs/experts.md`` has the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning.pytorch.cli import ArgsType, LightningCLI
from lightning.pytorch.utilities import rank_zero_info

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpt"))

from data import ByteText
from mixture import MixtureLanguageModel
from precision import fast_precision

__all__ = ["MixtureCLI", "main"]


class MixtureCLI(LightningCLI):
    """LightningCLI that chooses the precision where the YAML leaves it open, and says what was trained."""

    def before_instantiate_classes(self) -> None:
        """Choose the precision."""
        trainer = self.config[self.subcommand].trainer
        if trainer.precision is None:
            trainer.precision, reason = fast_precision(trainer.accelerator)
            rank_zero_info(f"precision: {trainer.precision} ({reason})")

    def after_fit(self) -> None:
        """Print the numbers of parameters and the loss on the validation text."""
        (metrics,) = self.trainer.validate(self.model, self.datamodule, verbose=False)
        size = self.model.size
        total = sum(param.numel() for param in self.model.parameters())
        experts = sum(param.numel() for name, param in self.model.named_parameters() if ".experts." in name)
        active = total - experts + (experts * size.k // size.experts if size.experts else 0)
        rank_zero_info(
            f"\nparameters       {total:,}, of which a token uses {active:,}"
            f"\nvalidation loss  {metrics['val/loss']:.3f} nats per byte after {self.trainer.global_step} steps"
        )


def main(args: ArgsType = None) -> None:
    """Run the command line."""
    MixtureCLI(MixtureLanguageModel, ByteText, args=args)


if __name__ == "__main__":
    main()
