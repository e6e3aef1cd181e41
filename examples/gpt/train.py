"""Train a byte-level GPT on the text of the Python standard library.

    python examples/gpt/train.py fit --config examples/gpt/cpu.yaml

Every value of the YAML can be changed on the command line: ``--trainer.accelerator gpu --trainer.devices 8`` runs the
same on GPUs, ``--data.path my_text/ --data.pattern '**/*.txt'`` on another text.
"""

from __future__ import annotations

from data import ByteText, bigram_entropy, unigram_entropy
from language_model import LanguageModel
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info
from model import sample
from precision import fast_precision

import lightning_zero

__all__ = ["GPTCLI", "main"]


class GPTCLI(LightningCLI):
    """LightningCLI that chooses the precision where the YAML leaves it open, and shows what was learned."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of the end."""
        parser.add_argument("--sample_bytes", type=int, default=400, help="Bytes of text to generate after training.")

    def before_instantiate_classes(self) -> None:
        """Choose the precision."""
        trainer = self.config[self.subcommand].trainer
        if trainer.precision is None:
            trainer.precision, reason = fast_precision(trainer.accelerator)
            rank_zero_info(f"precision: {trainer.precision} ({reason})")

    def after_fit(self) -> None:
        """Print the loss on the validation text beside what simple statistics reach, and some generated text."""
        (metrics,) = self.trainer.validate(self.model, self.datamodule, verbose=False)
        text = self.datamodule.val_text
        rank_zero_info(
            f"\nvalidation loss  {metrics['val/loss']:.3f} nats per byte (perplexity {metrics['val/perplexity']:.2f})"
            f"\nbigram entropy   {bigram_entropy(text):.3f}"
            f"\nunigram entropy  {unigram_entropy(text):.3f}"
        )
        with lightning_zero.gathered(self.model):
            if self.trainer.is_global_zero:
                self._print_sample(b"def ", length=self.config[self.subcommand].sample_bytes)
        self.trainer.strategy.barrier()

    def _print_sample(self, prompt: bytes, length: int) -> None:
        self.model.eval()
        with self.trainer.precision_plugin.forward_context():
            text = sample(self.model, prompt, length, context=self.datamodule.context)
        print("\n" + text.decode("utf-8", errors="replace") + "\n", flush=True)


def main(args: ArgsType = None) -> None:
    """Run the command line."""
    GPTCLI(LanguageModel, ByteText, args=args)


if __name__ == "__main__":
    main()
