"""`paceline bench`: the time of a step of small models in Paceline, a hand-written loop and other libraries."""
