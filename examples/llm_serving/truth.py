"""Questions and the right answers: the whole model's own, by `generate` of transformers, in one process, undisturbed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import model as definition
import torch
from model import Settings, load, tokenizer_of

__all__ = ["Case", "cases"]

WORDS = [
    "a",
    "stage",
    "of",
    "the",
    "pipeline",
    "dies",
    "while",
    "tokens",
    "flow",
    "and",
    "a",
    "standby",
    "takes",
    "its",
    "place",
    "at",
    "once",
]


@dataclass
class Case:
    """A question, and the tokens of its whole answer."""

    prompt: str
    tokens: list[int]


def cases(settings: Settings | None = None, count: int = 32, longest: int = 72) -> list[Case]:
    """Make questions of different lengths and answer them; kept in a file, as it takes some seconds."""
    settings = settings or Settings()
    makers = [torch.__version__, version("transformers")]
    makers += [Path(file).read_text() for file in (__file__, definition.__file__)]
    key = json.dumps([asdict(settings), count, longest, *makers])
    kept = (
        Path(tempfile.gettempdir()) / f"m8d-llm-serving-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    )
    try:
        return [Case(**each) for each in json.loads(kept.read_text())]
    except (OSError, ValueError, TypeError):  # there is none yet, or it is not one of ours
        pass
    print(f"answering {count} questions with the whole model, to compare ...", flush=True)
    model, tokenizer = load(settings), tokenizer_of(settings)
    # More threads wait for each other, as the model is small: for minutes beside other work.
    torch.set_num_threads(1)
    made = []
    number = 0
    while len(made) < count:
        number += 1
        words = [WORDS[(number * step) % len(WORDS)] for step in range(1, 2 + number % 7)]
        prompt = f"{number} {' '.join(words)}"
        tokens = tokenizer.encode(prompt)
        out = model.generate(torch.tensor([tokens]), max_new_tokens=longest, do_sample=False)
        answer = out[0, len(tokens) :].tolist()
        if len(answer) > longest // 3:  # some of random weights end at once
            made.append(Case(prompt, answer))
    # Without room, or beside another user's file, they are made again the next time.
    with contextlib.suppress(OSError):
        _keep(kept, json.dumps([asdict(case) for case in made]))
    return made


def _keep(kept: Path, text: str) -> None:
    """Write the file as a whole, also while another run does."""
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, prefix=kept.stem, delete=False) as part:
        try:
            part.write(text)
            part.flush()
            Path(part.name).replace(kept)
        except BaseException:
            Path(part.name).unlink()
            raise
