"""Installing what older versions need: how a machine without a network says so."""

NO_NETWORK = ("Temporary failure in name resolution", "Network is unreachable", "ConnectionError")
