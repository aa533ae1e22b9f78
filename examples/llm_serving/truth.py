"""Questions and the right answers: the whole model's own, by `generate` of transformers, in one process, undisturbed."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

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
    key = json.dumps([asdict(settings), count, longest, torch.__version__, Path(__file__).read_text()])
    kept = (
        Path(tempfile.gettempdir()) / f"m8d-llm-serving-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    )
    try:
        return [Case(**each) for each in json.loads(kept.read_text())]
    except (OSError, ValueError, TypeError):  # there is none yet, or it is not one of ours
        pass
    print(f"answering {count} questions with the whole model, to compare ...", flush=True)
    model, tokenizer = load(settings), tokenizer_of(settings)
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
    part = kept.with_suffix(".part")
    part.write_text(json.dumps([asdict(case) for case in made]))
    part.replace(kept)
    return made
