"""`g4spec serve`: an HTTP server with the APIs of OpenAI, Anthropic and llama.cpp."""
