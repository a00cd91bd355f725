"""The execution of captured graphs: runner, capture policy, executors."""
