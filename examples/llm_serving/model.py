"""The decoder in stages: a model of transformers whose layers run in parts, with a cache of keys and values in slots.

Every process has the whole model, so any of them can be any stage. A batch says which sequences (slots) it continues,
from which position, with how many tokens; sequences of different lengths share a batch, and come and go between steps.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["SHORTEST", "Batch", "Bytes", "Decoder", "Settings", "Tokenizer", "load", "tokenizer_of"]

SHORTEST = 8
"""Tokens that a slot holds at least: `Decoder.warm` runs so many."""


@dataclass(frozen=True)
class Settings:
    """What model it is, and how many sequences of which length a process keeps.

    Attributes:
        model: a folder, or a name on the hub, with real weights; empty: a small Llama with random ones.
        dtype: float64 for the small one. There a token can be compared with an undisturbed run: batches of another
            shape add in another order, and float32 would turn an argmax over now and then.
        length: tokens of the longest sequence, prompt and answer.
        slots: sequences that a process keeps at most.
    """

    model: str = ""
    dtype: str = "float64"
    length: int = 128
    slots: int = 24

    def torch_dtype(self) -> torch.dtype:
        """The dtype by its name."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise SystemExit(f"--dtype {self.dtype!r} is no dtype of torch: name one, such as float32.")
        return found


class Tokenizer(Protocol):
    """What the front needs of a tokenizer of transformers."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens."""


class Bytes:
    """A token for each byte, one that begins a text and one that ends it: the random model's tokenizer."""

    BOS, eos_token_id, SIZE = 256, 257, 259

    def encode(self, text: str) -> list[int]:
        """The beginning, then the bytes of UTF-8."""
        return [self.BOS, *text.encode()]

    def decode(self, tokens: list[int]) -> str:
        """What bytes there are."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def tokenizer_of(settings: Settings) -> Tokenizer:
    """The tokenizer of the model."""
    if not settings.model:
        return Bytes()
    from transformers import AutoTokenizer  # noqa: PLC0415  (only where it is needed: it takes long)

    found: Tokenizer = AutoTokenizer.from_pretrained(settings.model)
    return found


def load(settings: Settings) -> Any:
    """The model; with random weights they are the same in all processes."""
    # The module, not the package's lazy names: those import much more.
    if settings.model:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415  (only where it is needed: it takes long)

        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=settings.torch_dtype())
    else:
        from transformers.models.llama.configuration_llama import LlamaConfig  # noqa: PLC0415  (only where it is needed: it takes long)
        from transformers.models.llama.modeling_llama import LlamaForCausalLM  # noqa: PLC0415  (only where it is needed: it takes long)

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=Bytes.SIZE, hidden_size=128, intermediate_size=344, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=max(2048, settings.length),
            initializer_range=0.15,  # wide, or the answers of random weights repeat one token
            bos_token_id=Bytes.BOS, eos_token_id=Bytes.eos_token_id, pad_token_id=258,
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(settings.torch_dtype())
    return model.eval()


@dataclass
class Batch:
    """Sequences that go through a stage together.

    Attributes:
        slots: where each one's keys and values lie.
        starts: position of each one's first token in this batch.
        counts: tokens of each one; what is beyond in the batch is padding.
    """

    slots: Tensor
    starts: Tensor
    counts: Tensor

    @staticmethod
    def of(slots: list[int], starts: list[int], counts: list[int]) -> Batch:
        """Make one."""
        return Batch(torch.tensor(slots), torch.tensor(starts), torch.tensor(counts))

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.slots)


class _Slots:
    """Keys and values of all layers, as a cache of transformers: `update` is what attention calls."""

    def __init__(self, settings: Settings, config: Any) -> None:
        heads = config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (settings.slots, settings.length, heads, width)
        self.settings, self.shape, self.dtype = settings, shape, settings.torch_dtype()
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # only of those that this process has run
        self.slots = self.positions = self.rows = torch.empty(0, dtype=torch.int64)
        self.valid = torch.empty(0, dtype=torch.bool)
        self.seen = 0

    def begin(self, batch: Batch, width: int) -> Tensor:
        """Note where the batch lies; returns the mask: each token sees its sequence up to itself."""
        columns = torch.arange(width)
        self.positions = batch.starts[:, None] + columns
        self.valid = columns < batch.counts[:, None]
        self.slots, self.rows = batch.slots, batch.slots[:, None].expand(-1, width)[self.valid]
        self.seen = int((batch.starts + batch.counts).max())
        return (torch.arange(self.seen) <= self.positions[..., None])[:, None]

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the batch's keys and values; return those of its sequences up to the longest.

        Padding is not written: behind a sequence that is replayed lie the keys of its token that is under way.
        """
        if layer_idx not in self.layers:
            self.layers[layer_idx] = (
                torch.zeros(self.shape, dtype=self.dtype),
                torch.zeros(self.shape, dtype=self.dtype),
            )
        written = []
        for kept, fresh in zip(self.layers[layer_idx], (keys, values), strict=True):
            kept[self.rows, self.positions[self.valid]] = fresh.transpose(1, 2)[self.valid]
            written.append(kept[self.slots, : self.seen].transpose(1, 2))
        return written[0], written[1]

    def get_seq_length(self, *_: Any) -> int:
        """Some versions of attention ask; masks and positions are given to them here."""
        return 0


class Decoder:
    """A model that runs stage by stage."""

    def __init__(self, settings: Settings, stages: int) -> None:
        self.settings, self.stages = settings, stages
        self.model = load(settings)
        self.inner = self.model.model
        self.cache = _Slots(settings, self.model.config)
        count = len(self.inner.layers)
        if not 1 <= stages <= count:
            raise SystemExit(f"{stages} stages for a model of {count} layers: a stage needs one at least.")
        self.bounds = [count * stage // stages for stage in range(stages + 1)]
        known = inspect.signature(self.inner.layers[0].forward).parameters
        self.cache_name = "cache" if "cache" in known else "past_key_values"  # transformers renamed it

    @property
    def hidden(self) -> int:
        """Numbers of a token between stages."""
        return int(self.model.config.hidden_size)

    @torch.inference_mode()
    def run(self, stage: int, batch: Batch, data: Tensor) -> Tensor:
        """Run one stage.

        Args:
            stage: its number.
            batch: which sequences.
            data: tokens [rows, width] of int64 for stage 0, what the stage before returned for the others.

        Returns:
            [rows, width, hidden], and of the last stage the next token of each sequence, [rows] of int64.
        """
        mask = self.cache.begin(batch, data.shape[1])
        hidden = self.inner.embed_tokens(data) if stage == 0 else data
        positions = self.cache.positions
        rotary = self.inner.rotary_emb(hidden, positions)
        for layer in self.inner.layers[self.bounds[stage] : self.bounds[stage + 1]]:
            hidden = layer(
                hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary,
                use_cache=True, **{self.cache_name: self.cache},
            )  # fmt: skip
        if stage < self.stages - 1:
            return hidden
        last = hidden[torch.arange(batch.rows), batch.counts - 1]
        return self.model.lm_head(self.inner.norm(last)).argmax(-1)

    def warm(self) -> None:
        """Run each stage once: memory is there, and code is loaded, before the first request."""
        for width in (SHORTEST, 1):
            batch = Batch.of([0, 1], [0, 0], [width, width])
            data = torch.zeros(2, width, dtype=torch.int64)
            for stage in range(self.stages):
                data = self.run(stage, batch, data)
