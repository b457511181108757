"""What a run will need, from its config alone: parameters, bytes on each rank, bytes on the wire, time by a roofline."""
