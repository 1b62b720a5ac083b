"""Errors that one rank raises because of another."""


class OtherRankFailed(RuntimeError):
    """Another rank failed; its own error is the one that counts."""
