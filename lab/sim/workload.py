"""Texts that requests bring: shared beginnings, several tenants, turns that go on.

A text is the list of its *marks*: the running digest after each token, begun from the
namespace. A mark stands for the bytes that computing the token leaves in the KV cache, for
these depend on all tokens before it. The mark at the end of a block is the block's key.

The one rule that must not break: equal marks mean equal bytes, and nothing else does.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from lab.sim.conditions import TENANTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from lab.sim.conditions import Conditions

Mark = bytes
Content = tuple[Mark, ...]
"""What lies in a slot: the marks of the tokens whose KV was written there."""

_PREAMBLES = 3
"""How many beginnings the texts of one world share."""
_REMEMBERED = 12
"""Of so many earlier texts, one may be continued or asked again."""


WEIGHTS = ("first", "second", "")
"""Versions of the model's weights; a model begins with the first. The last one has no name."""


class Namespace(NamedTuple):
    """Whose texts they are, and the mark they begin from with the first weights."""

    tenant: str
    digest: bytes


class Text:
    """A prompt and what was generated after it."""

    __slots__ = ("marks", "namespace", "tokens", "weights")

    def __init__(
        self, namespace: Namespace, tokens: list[int], marks: list[Mark], weights: str
    ) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.marks = marks
        self.weights = weights

    def __len__(self) -> int:
        return len(self.marks)

    def beginning(self, count: int) -> int:
        """A number for the first tokens, whatever the namespace; never nought."""
        digest = blake2b(bytes(self.tokens[:count]), digest_size=2).digest()
        return 1 + int.from_bytes(digest, "little")

    def cut(self, count: int) -> Text:
        """A text that is the same up to `count` tokens."""
        return Text(self.namespace, self.tokens[:count], self.marks[:count], self.weights)


class Library:
    """Makes the texts of one world, and knows the right content of every full block."""

    def __init__(self, rng: Random, conditions: Conditions) -> None:
        self.block_tokens = conditions.settings.block_tokens
        self.right: dict[Mark, Content] = {}
        """Key of a block to the content that it names."""
        self.weights = WEIGHTS[0]
        """Which the model has now: texts of new requests have its marks."""
        self.weights_of: dict[Mark, str] = {}
        """Key of a block to the weights that it was made with."""
        self._rng = rng
        self._alphabet = conditions.alphabet
        self._length_max = conditions.blocks_max * self.block_tokens
        namespaces = [
            Namespace(tenant, blake2b(f"{tenant}/{adapter}".encode(), digest_size=16).digest())
            for tenant in TENANTS[: rng.randint(1, len(TENANTS))]
            for adapter in range(rng.randint(1, 2))
        ]
        self._preambles = [
            self._grown(
                self._empty_text(rng.choice(namespaces)), rng.randint(0, self._length_max // 2)
            )
            for _ in range(_PREAMBLES)
        ]
        self._earlier: list[Text] = []

    def next_text(self) -> Text:
        """The text of a new request: a new one, an old one, or a new turn of an old one."""
        rng = self._rng
        kind = rng.random()
        if not self._earlier or kind < 0.25:
            return self._grown(rng.choice(self._preambles), self._some_tokens())
        text = rng.choice(self._earlier)
        if kind < 0.5:
            return self._grown(text, 0)
        if kind < 0.8:
            return self._grown(text, self._some_tokens())
        return self._grown(text.cut(rng.randint(0, len(text))), self._some_tokens())

    def remember(self, text: Text) -> None:
        """A request has ended; a later one may go on from its text."""
        self._earlier.append(text)
        if len(self._earlier) > _REMEMBERED:
            del self._earlier[self._rng.randrange(_REMEMBERED)]

    def fresh_text(self, name: str, count: int) -> Text:
        """A text that shares nothing with any other, not even its namespace."""
        namespace = Namespace(name, blake2b(name.encode(), digest_size=16).digest())
        return self._grown(self._empty_text(namespace), count)

    def extend(self, text: Text, count: int) -> None:
        """Adds generated tokens to a text."""
        self._append(text, [self._rng.randrange(self._alphabet) for _ in range(count)])

    def with_weights_now(self, text: Text) -> Text:
        """The same tokens, as the model computes them now."""
        if text.weights == self.weights:
            return text
        found = self._empty_text(text.namespace)
        self._append(found, text.tokens)
        return found

    def room_in(self, text: Text) -> int:
        """How many tokens a text may still get."""
        return self._length_max - len(text)

    def keys(self, text: Text, first: int, end: int) -> list[Mark]:
        """The keys of the full blocks `first` to `end` of a text."""
        size = self.block_tokens
        return text.marks[(first + 1) * size - 1 : end * size : size]

    def all_keys(self, text: Text) -> list[Mark]:
        """The keys of all full blocks of a text."""
        return text.marks[self.block_tokens - 1 :: self.block_tokens]

    def _empty_text(self, namespace: Namespace) -> Text:
        return Text(namespace, [], [], self.weights)

    def _append(self, text: Text, tokens: Sequence[int]) -> None:
        marks = text.marks
        mark = marks[-1] if marks else text.namespace.digest
        if not marks and text.weights != WEIGHTS[0]:
            mark = blake2b(mark + text.weights.encode(), digest_size=16).digest()
        for token in tokens:
            mark = blake2b(mark + bytes((token,)), digest_size=16).digest()
            text.tokens.append(token)
            marks.append(mark)
            if len(marks) % self.block_tokens == 0:
                self.right[mark] = tuple(marks[-self.block_tokens :])
                self.weights_of[mark] = text.weights

    def _grown(self, text: Text, count: int) -> Text:
        longer = self.with_weights_now(text.cut(len(text)))
        self.extend(longer, min(count, self._length_max - len(text)))
        if not len(longer):
            self.extend(longer, 1)
        return longer

    def _some_tokens(self) -> int:
        return self._rng.randint(1, max(1, self._length_max * 2 // 3))
