"""Streams that go on elsewhere: the ledger, the policy of resuming, the connections to workers, the dispatcher."""
