"""Models of transformers whose attention and feed-forward stand side by side; see ``published_models``."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.accuracy.published_models import Arithmetic, Shape, Shapes, Weights, attend, rotate, shifted_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDecoder:
    """Falcon (one norm, no biases) and GPT-NeoX (a norm for each branch, biases, a quarter of every head rotated).

    Attributes:
        shape, arithmetic: As in :class:`Model`.
        has_two_norms: A norm for each branch.
        has_bias: Linear operations have biases.
        rotary: Part of a head that is rotated.
        casts_logits, copies_shifted: As in :class:`LlamaLike`.
    """

    shape: Shape
    arithmetic: Arithmetic
    has_two_norms: bool = False
    has_bias: bool = False
    rotary: float = 1.0
    casts_logits: bool = False
    copies_shifted: bool = True

    @property
    def root(self) -> Shapes:
        """Embedding, final norm, output layer."""
        table = (self.shape.vocabulary, self.shape.hidden)
        head = {} if self.shape.is_tied else {"head": table}
        return {"embedding": table, "norm": (self.shape.hidden,), "norm_bias": (self.shape.hidden,), **head}

    @property
    def layer_shapes(self) -> Shapes:
        """One layer."""
        s = self.shape
        joint = (s.heads + 2 * s.kv_heads) * s.head
        matrices = {
            "qkv": (joint, s.hidden),
            "o": (s.hidden, s.hidden),
            "up": (s.ffn, s.hidden),
            "down": (s.hidden, s.ffn),
        }
        biases = {f"{name}_bias": shape[:1] for name, shape in matrices.items()} if self.has_bias else {}
        norms = ("norm_1", "norm_1_bias") + (("norm_2", "norm_2_bias") if self.has_two_norms else ())
        return {**dict.fromkeys(norms, (s.hidden,)), **matrices, **biases}

    @property
    def buffer_bytes(self) -> int:
        """Frequencies of the rotation."""
        return 2 * self.shape.head

    def begin(self, weights: Weights, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Embeddings and rotation tables."""
        x = F.embedding(tokens, weights["embedding"])
        size = int(self.rotary * self.shape.head)
        table = torch.empty(1, 1, tokens.shape[1], size, dtype=torch.float32, device="meta")
        return x, (table.cos().to(x.dtype), table.sin().to(x.dtype))

    def layer(self, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """Both branches of the same input, added together and to it."""
        normed = self._norm(weights, x, "norm_1")
        attended = self._attention(weights, normed, shared)
        if self.has_two_norms:
            normed = self._norm(weights, x, "norm_2")
        wide = F.gelu(self._linear(weights, normed, "up"))
        return self._linear(weights, wide, "down") + attended + x, None

    def end(self, weights: Weights, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Output layer and loss."""
        x = self._norm(weights, x, "norm")
        head = weights["embedding"] if self.shape.is_tied else weights["head"]
        return shifted_loss(
            self.arithmetic,
            lambda: self.arithmetic.linear(x, head),
            tokens,
            casts=self.casts_logits,
            copies=self.copies_shifted,
        )

    def _norm(self, weights: Weights, x: Tensor, name: str) -> Tensor:
        return self.arithmetic.layer_norm(x, weights[name], weights[f"{name}_bias"])

    def _linear(self, weights: Weights, x: Tensor, name: str) -> Tensor:
        return self.arithmetic.linear(x, weights[name], weights.get(f"{name}_bias"))

    def _attention(self, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]) -> Tensor:
        s = self.shape
        batch, length, _ = x.shape
        joint = self._linear(weights, x, "qkv")
        sizes = (s.heads * s.head, s.kv_heads * s.head, s.kv_heads * s.head)
        query, key, value = (p.view(batch, length, -1, s.head).transpose(1, 2) for p in joint.split(sizes, dim=-1))
        del joint
        query, key = self._rotate(query, shared), self._rotate(key, shared)
        out = attend(self.arithmetic, query, key, value)
        return self._linear(weights, out.reshape(batch, length, -1), "o")

    def _rotate(self, x: Tensor, shared: tuple[Tensor, ...]) -> Tensor:
        cos, sin = shared
        size = cos.shape[-1]
        if size == x.shape[-1]:
            return rotate(x, cos, sin)
        return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), dim=-1)
