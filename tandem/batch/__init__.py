"""`tandem batch`: a file of requests in OpenAI's batch format against a running service."""
