"""Helpers of tests that are not public: what `holdfast.testing` is for users' tests, this is for ours."""
