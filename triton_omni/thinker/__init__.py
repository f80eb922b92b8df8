"""The thinker: chat messages with text, audio, images and video in; token ids, text and the talker's rows out."""
