"""Progress that suits where it is read: a bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm


class Progress:
    """Counts work done out of `total` units; a context manager.

    name: what is running; unit: what is counted; every: seconds between two lines of a log.
    """

    def __init__(self, name: str, total: float, unit: str, *, done: float = 0, every: float = 15.0):
        self.name, self.total, self.unit, self.every = name, total, unit, every
        self.first, self.done, self.note = done, done, ""
        self.started = self.printed = time.perf_counter()
        self.bar = (
            tqdm(total=total, initial=done, desc=name, unit=f" {unit}", dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()
        else:
            self._print()

    @property
    def rate(self) -> float:
        """Units per second since the start."""
        return (self.done - self.first) / max(time.perf_counter() - self.started, 1e-9)

    def advance(self, amount: float, note: str = "") -> None:
        """`amount` more units are done; `note` says how it goes (loss, acceptance, ...)."""
        self.done += amount
        self.note = note or self.note
        if self.bar is not None:
            self.bar.update(amount)
            self.bar.set_postfix_str(self.note, refresh=False)
        elif time.perf_counter() - self.printed >= self.every:
            self._print()

    def _print(self) -> None:
        self.printed = time.perf_counter()
        left = max(0.0, self.total - self.done) / max(self.rate, 1e-9)
        print(
            f"{self.name}: {self.done:.0f}/{self.total:.0f} {self.unit}, {self.rate:.1f} {self.unit}/s, "
            f"{left:.0f} s left {self.note}".rstrip(),
            flush=True,
        )
