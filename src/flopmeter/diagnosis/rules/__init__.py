"""One file per cause, named as the cause; the contract is in `flopmeter.diagnosis`."""
