"""What scheduler, workers and clients have in common. Holds no service code and imports none."""

import os

# gRPC reads it when it is first imported. Unset, it is not the documented ERROR: each failed handshake would be a line
# of gRPC's own between those of a command's user, and in the JSON log. What fails is told in Tandem's words.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__version__ = "0.1.0"
