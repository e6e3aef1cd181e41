"""Fine-tune a Llama-style model of Hugging Face's transformers whose states sleep in host memory.

    python examples/finetune_offload/train.py fit --config examples/finetune_offload/full.yaml
    python examples/finetune_offload/train.py fit --config examples/finetune_offload/adapters.yaml
    python examples/finetune_offload/train.py fit --config examples/finetune_offload/nvme.yaml

The first trains all parameters, the second adapters beside frozen weights, which sleep in host memory too; the third
trains all parameters, and everything sleeps in files. They start from random weights of a small model; ``--model.path
FOLDER`` takes a model on this machine, and its tokenizer. They run on a CPU, and on a GPU where there is one.
"""

from __future__ import annotations

from data import Text
from language_model import LanguageModel
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info

__all__ = ["FineTuningCLI", "main"]


class FineTuningCLI(LightningCLI):
    """LightningCLI that shows the loss on the validation text before and after."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Take the tokenizer from the folder of the model."""
        parser.link_arguments("model.path", "data.tokenizer")

    def before_instantiate_classes(self) -> None:
        """Choose the precision where the YAML leaves it open."""
        trainer = self.config[self.subcommand].trainer
        if trainer.precision is None:
            on_gpu = trainer.accelerator != "cpu" and CUDAAccelerator.is_available()
            trainer.precision = "bf16-mixed" if on_gpu else "32-true"

    def before_fit(self) -> None:
        """Measure what there is to improve."""
        self.loss_before = self._validation_loss()

    def after_fit(self) -> None:
        """Say what was trained, and what it brought."""
        trained = sum(param.numel() for param in self.model.parameters() if param.requires_grad)
        total = sum(param.numel() for param in self.model.parameters())
        rank_zero_info(
            f"\ntrained {trained:,} of {total:,} parameters"
            f"\nvalidation loss {self.loss_before:.3f} before, {self._validation_loss():.3f} after (nats per token)"
        )

    def _validation_loss(self) -> float:
        (metrics,) = self.trainer.validate(self.model, self.datamodule, verbose=False)
        return float(metrics["val/loss"])


def main(args: ArgsType = None) -> None:
    """Run the command line."""
    FineTuningCLI(LanguageModel, Text, args=args)


if __name__ == "__main__":
    main()
