"""`g4spec serve`: the engine behind HTTP, in the dialects that clients already speak."""
