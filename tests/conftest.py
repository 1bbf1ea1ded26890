"""Where there is no GPU, kernels run in Triton's interpreter. It must be chosen before anything imports triton, and
transformers does too, so it is chosen here; where torch is not installed there is nothing to choose.

No test has a time limit of its own: machines are shared.
"""

import os
import signal
from importlib.util import find_spec

from hypothesis import settings

# A script's background job ignores Ctrl-C, nohup a closed terminal, and so would every service that is started here.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")

if find_spec("torch"):
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
