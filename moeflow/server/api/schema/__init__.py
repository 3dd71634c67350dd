"""What requests and answers hold, in OpenAI's words."""
