"""The two tiny trained models that ship with Tandem: where their folders are, which are called what they serve as.

They are real Qwen3 checkpoints in Hugging Face's layout, small enough to live in the repository: a first run needs no
download, and the tests have an oracle whose greedy output does not hang on the last bit of a matrix product.
"""

from pathlib import Path
from typing import Final

DENSE: Final = Path(__file__).parent / "tiny"
MOE: Final = Path(__file__).parent / "tiny-moe"
