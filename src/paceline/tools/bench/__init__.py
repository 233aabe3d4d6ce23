"""`paceline bench`: small models through Paceline, a hand-written loop and other libraries, side by side."""
