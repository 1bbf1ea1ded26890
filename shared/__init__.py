"""What scheduler, workers and clients have in common. Holds no service code and imports none."""

__version__ = "0.1.0"
