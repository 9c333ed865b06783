"""One exchange on both ends: encoding and decoding, bounds, weights and means."""
