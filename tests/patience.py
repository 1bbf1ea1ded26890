"""How long tests wait for what must come. It ends a run that hangs, and demands nothing: machines are shared."""

PATIENCE_S = 240.0
"""Seconds. What has not come by then is not coming."""
