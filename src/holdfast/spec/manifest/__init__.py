"""A deployment as a `DynamoGraphDeployment` manifest: read, checked, addressed, planned as pods. All of it is pure."""
