"""What scheduler, workers and clients have in common. Holds no service code and imports none."""
