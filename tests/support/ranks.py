"""A pool of living processes that play ranks; the package has it for ``planaria parity``."""

from planaria.parity.ranks import FORM_TIMEOUT_S, RankPool

__all__ = ["FORM_TIMEOUT_S", "RankPool"]
