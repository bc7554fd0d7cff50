"""How long the documents of a corpus are, and what was cut or left out, counted as they stream by.

Memory is constant: sums are exact, lengths fall into bins that end at powers of two.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Self

from megatron_splitkv.data.chat import Encoded
from megatron_splitkv.data.partial import write_aside

_MAX_BINS = 64
_BAR = 24  # columns


class Bin(NamedTuple):
    """Documents of `shortest` to `longest` tokens, both included."""

    shortest: int
    longest: int
    documents: int
    tokens: int


@dataclass
class LengthReport:
    """Lengths and losses of a stream of documents.

    Attributes:
        documents, tokens, supervised_tokens: of what is kept, after truncation.
        shortest, longest: tokens of a kept document; 0 without one.
        truncated, truncated_tokens: kept documents that were cut, and what was cut off them.
        without_response, without_response_tokens: documents whose prompt fills the sequence length:
            left out, with all their tokens.
        rewritten: responses that the chat template does not show as the target says them.
        bin_documents, bin_tokens: kept documents and their tokens by length; entry b counts
            lengths over ``2**(b - 1)`` up to ``2**b``.
    """

    documents: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    shortest: int = 0
    longest: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    without_response: int = 0
    without_response_tokens: int = 0
    rewritten: int = 0
    bin_documents: list[int] = field(default_factory=lambda: [0] * _MAX_BINS)
    bin_tokens: list[int] = field(default_factory=lambda: [0] * _MAX_BINS)

    def add(self, encoded: Encoded) -> None:
        """Count one document: as left out if it is `without_response`, as kept otherwise."""
        length = encoded.sample.token_ids.numel()
        if encoded.without_response:
            self.without_response += 1
            self.without_response_tokens += length + encoded.truncated
            return
        self.shortest = min(self.shortest, length) if self.documents else length
        self.longest = max(self.longest, length)
        self.documents += 1
        self.tokens += length
        self.supervised_tokens += int(encoded.sample.loss_mask.sum())
        self.truncated += encoded.truncated > 0
        self.truncated_tokens += encoded.truncated
        self.rewritten += encoded.rewritten
        self.bin_documents[(length - 1).bit_length()] += 1
        self.bin_tokens[(length - 1).bit_length()] += length

    def bins(self) -> list[Bin]:
        """The histogram, from the first bin with a document to the last."""
        used = [b for b, count in enumerate(self.bin_documents) if count]
        return [
            Bin((1 << b >> 1) + 1, 1 << b, self.bin_documents[b], self.bin_tokens[b])
            for b in (range(used[0], used[-1] + 1) if used else ())
        ]

    def to_json(self) -> dict[str, Any]:
        """All counts, as plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """A report that goes on counting where `to_json` stopped."""
        return cls(**values)

    def lines(self) -> list[str]:
        """A text histogram of at most 80 columns, and what was cut or left out."""
        return [*self._histogram(), *self._losses()]

    def draw(self, path: str | os.PathLike[str]) -> None:
        """The histogram as a PNG file: documents above, their tokens below."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(8, 5.2), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        bins = self.bins()
        panels = figure.subplots(2, 1, sharex=True)
        counts = (
            ("documents", "#0072B2", [each.documents for each in bins]),
            ("tokens", "#D55E00", [each.tokens for each in bins]),
        )
        for axes, (label, colour, values) in zip(panels, counts, strict=True):
            bars = axes.bar(range(len(bins)), values, color=colour, width=0.92)
            axes.bar_label(bars, [_short(value) if value else "" for value in values], fontsize=8)
            axes.set_ylabel(label)
            axes.margins(y=0.14)
            axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
            axes.yaxis.set_major_formatter(lambda value, _: _short(value))
            axes.grid(axis="y", color="#dddddd", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        panels[-1].set_xticks(range(len(bins)), [_power(each.longest) for each in bins])
        panels[-1].set_xlabel("length in tokens, up to")
        panels[0].set_title(self._head(), fontsize=11, loc="left")
        picture = BytesIO()
        figure.savefig(picture, format="png")
        write_aside(Path(path), picture.getvalue())

    def _head(self) -> str:
        if not self.documents:
            return "no documents"
        return (
            f"{_count(self.documents, 'document')} of {self.shortest:,} to {self.longest:,} "
            f"tokens, mean {self.tokens / self.documents:,.0f}"
        )

    def _histogram(self) -> Iterator[str]:
        yield self._head()
        bins = self.bins()
        if not bins:
            return
        yield f"{'length in tokens':>20} {'documents':>13} {'':{_BAR}} {'share of tokens':>18}"
        most = max(each.documents for each in bins)
        for each in bins:
            bar = "#" * -(-_BAR * each.documents // most)
            yield (
                f"{each.shortest:>9,} - {each.longest:>9,} {each.documents:>12,} {bar:<{_BAR}} "
                f"{each.tokens / self.tokens:>18.1%}"
            )

    def _losses(self) -> Iterator[str]:
        if self.documents:
            yield f"{self.supervised_tokens:,} of {self.tokens:,} tokens carry loss"
        if self.truncated:
            yield (
                f"{_count(self.truncated, 'document')} cut on the right, "
                f"{_count(self.truncated_tokens, 'token')} cut off"
            )
        if self.without_response:
            yield (
                f"{_count(self.without_response, 'document')} left out, as the prompt fills the "
                "sequence length"
            )
        if self.rewritten:
            yield (
                f"{_count(self.rewritten, 'response')} without loss, changed or hidden by the chat "
                "template"
            )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _power(length: int) -> str:
    """A power of two as people write lengths: 512, 4k, 256k, 1M."""
    exponent = (length.bit_length() - 1) // 10
    return f"{length >> 10 * exponent}{('', 'k', 'M', 'G', 'T')[min(4, exponent)]}"


def _short(number: float) -> str:
    """A count in at most five characters: 950, 12.5k, 3M."""
    for suffix in ("", "k", "M", "G", "T"):
        if number < 999.5 or suffix == "T":
            break
        number /= 1000
    return f"{number:.3g}{suffix}"
