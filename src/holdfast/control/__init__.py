"""The process that asks the workers, judges them by what they do, and writes down what each has earned."""
