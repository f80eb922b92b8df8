"""OpenAI's realtime protocol over a WebSocket: one session, one conversation, speech in and out."""
