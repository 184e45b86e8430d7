"""Reads, checks and plans a deployment given as a `DynamoGraphDeployment` manifest. No I/O."""
