"""The launcher's view of a run: `follower` reads the run folder, `console` prints, `live` computes the lines."""
