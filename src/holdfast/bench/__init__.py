"""The commands behind every published figure, and the tools they share: a deployment of real processes, and
clients that write down what they received and when."""
