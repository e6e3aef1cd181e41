"""Steps with a `try` around their blocks, or around a value that they read, in pipeline stages."""

from __future__ import annotations

import pytest

from tests.fuzz.pipeline_runner import check, report
from tests.fuzz.pipelines import EMBEDDED, PipelineProgram
from tests.sampling import sample

LINEAR = ("Linear",) * 4
LOSS = len(LINEAR) + 2
OPTIONS = {"stages": 2, "schedule": "1f1b", "partition": "uniform", "microbatches": 2}

END = """logits = self.head(self.norm(hidden))
loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
self.log('loss', loss, on_step=False, on_epoch=True)
return loss"""

AROUND = {
    "passes": (
        "for block in self.blocks:\n    try:\n        hidden = block(hidden, mask)\n    except Exception:\n        pass"
    ),
    "tries-again": (
        "for block in self.blocks:\n    while True:\n        try:\n            hidden = block(hidden, mask)\n"
        "            break\n        except Exception:\n            pass"
    ),
    "raises-another": (
        "for number, block in enumerate(self.blocks):\n    try:\n        hidden = block(hidden, mask)\n"
        "    except Exception as error:\n        raise RuntimeError(f'block {number}') from error"
    ),
}


@pytest.mark.parametrize("name", sample([*AROUND], "tries-again", "raises-another"))
@pytest.mark.parametrize("schedule", sample(["1f1b", "interleaved_1f1b"], "1f1b"))
def test_steps_that_catch_errors_of_their_blocks_train(name: str, schedule: str) -> None:
    """A stage ends its run of the step by an exception, at the first block of the next one."""
    feature = ((EMBEDDED, f"{AROUND[name]}\n{END}"),)
    program = PipelineProgram(LINEAR, (feature,), options={**OPTIONS, "schedule": schedule})
    outcome = check(program)
    assert outcome.kind == "alike", report(program, outcome)


CAUGHT = {
    "behind": (
        (1, "first = hidden"),
        (LOSS, "try:\n    loss = loss / (1 + first.detach().norm().item())\nexcept RuntimeError:\n    pass"),
    ),
    "between": ((1, "scale = 1.0\ntry:\n    scale += float(hidden.abs().max())\nexcept Exception:\n    pass"),),
    "module": ((LOSS, "try:\n    self.embedding(ids)\nexcept Exception:\n    loss = loss * 2"),),
    "numpy": (
        (1, "first = hidden"),
        (LOSS, "try:\n    loss = loss * float(first.detach().numpy().std())\nexcept Exception:\n    pass"),
    ),
    "array": (
        (1, "first = hidden"),
        (
            LOSS,
            "try:\n    loss = loss * float(__import__('numpy').asarray(first.detach()).std())\n"
            "except Exception:\n    pass",
        ),
    ),
    "pickle": (
        (1, "first = hidden"),
        (LOSS, "try:\n    __import__('pickle').dumps(first.detach())\nexcept Exception:\n    loss = loss * 2"),
    ),
    "dlpack": (
        (1, "first = hidden"),
        (LOSS, "try:\n    torch.from_dlpack(first.detach())\nexcept Exception:\n    loss = loss * 2"),
    ),
    "text": (
        (1, "first = hidden"),
        (LOSS, "try:\n    loss = loss * float(f'{first.mean()}')\nexcept Exception:\n    pass"),
    ),
    "gradient": (
        (1, "first = hidden"),
        (
            LOSS,
            "try:\n    loss = loss + torch.autograd.grad(loss, first, create_graph=True)[0].square().mean()\n"
            "except Exception:\n    pass",
        ),
    ),
    "hook": (
        (1, "first = hidden"),
        (
            LOSS,
            "twice = first * 2\ntry:\n    twice.register_hook(lambda grad: grad * 2)\nexcept Exception:\n    pass\n"
            "loss = loss + twice.mean()",
        ),
    ),
    "zero_grad": ((LOSS, "try:\n    self.zero_grad()\nexcept Exception:\n    loss = loss * 2"),),
    "backward": ((LOSS, "try:\n    loss.backward(retain_graph=True)\nexcept Exception:\n    loss = loss * 2"),),
}
TEXTS = {
    "behind": "The step needs a value that an earlier pipeline stage computes",
    "between": "The step needs a value that an earlier pipeline stage computes",
    "module": "`embedding` is called before the blocks of `blocks`, and again after them",
    "numpy": "The step reads the values of a tensor of an earlier pipeline stage between the modules (`numpy`",
    "array": "The step reads the values of a tensor of an earlier pipeline stage between the modules (`__array__`",
    "pickle": "The step reads the values of a tensor of an earlier pipeline stage between the modules (`__reduce_ex__`",
    "dlpack": "The step reads the values of a tensor of an earlier pipeline stage between the modules (`__dlpack__`",
    "text": "The step reads the values of a tensor of an earlier pipeline stage between the modules (`__format__`",
    "gradient": "which modules of earlier pipeline stages use",
    "hook": "The step asks for the gradient of a value between the modules",
    "zero_grad": "zero_grad",
    "backward": "The step calls `backward` by itself",
}


@pytest.mark.parametrize("name", sample([*CAUGHT], "behind", "module", "numpy", "pickle", "gradient"))
def test_refusals_that_a_step_catches_are_raised_again(name: str) -> None:
    """It went on with a fallback, on one stage alone."""
    program = PipelineProgram(LINEAR, (CAUGHT[name],), options=OPTIONS)
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert TEXTS[name] in outcome.text


LOOPS = {
    "end": (
        "for block in self.blocks:\n    while True:\n        try:\n            hidden = block(hidden, mask)\n"
        "            break\n        except:\n            pass"
    ),
    "refusal": (
        "for block in reversed(self.blocks):\n    while True:\n        try:\n            hidden = block(hidden, mask)\n"
        "            break\n        except Exception:\n            pass"
    ),
}
ENDS = {"end": "The step calls a module again and again", "refusal": "is called out of turn"}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_that_catch_every_error_end(name: str) -> None:
    """They ran for ever on the stages that end before the last block."""
    feature = ((EMBEDDED, f"{LOOPS[name]}\n{END}"),)
    program = PipelineProgram(LINEAR, (feature,), options=OPTIONS)
    outcome = check(program)
    assert outcome.kind == "refused", report(program, outcome)
    assert ENDS[name] in outcome.text
