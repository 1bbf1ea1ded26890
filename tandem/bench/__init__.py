"""`tandem bench`: offers work to a running service from processes of its own, and measures what its clients see."""
