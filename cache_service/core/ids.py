"""Ids that say which start of the daemon they come from.

An id is `boot tag << 40 | counter`. So an id from before a restart cannot be taken for one of today, and one that was
given out and has ended can be told from one that never was, without remembering any.
"""

from __future__ import annotations

COUNTER_BITS = 40
TAG_BITS = 24


class IdSequence:
    """Ids of one kind of thing in one boot; never 0."""

    def __init__(self, boot_tag: int) -> None:
        """Start the sequence.

        Args:
            boot_tag: in [1, 2**24), different for every start of the daemon.
        """
        if not 1 <= boot_tag < 1 << TAG_BITS:
            raise ValueError(f"boot_tag must be in [1, 2**{TAG_BITS}), got {boot_tag}")
        self._tag = boot_tag
        self._next = 1

    def take(self) -> int:
        """A new id."""
        result = self._tag << COUNTER_BITS | self._next
        self._next += 1
        return result

    def was_issued(self, number: int) -> bool:
        """Whether `take` has returned this id in this boot."""
        tag, counter = divmod(number, 1 << COUNTER_BITS)
        return tag == self._tag and 1 <= counter < self._next

    def is_foreign(self, number: int) -> bool:
        """Whether the id carries the tag of another boot."""
        return number >> COUNTER_BITS not in (0, self._tag)
