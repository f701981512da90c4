"""The paper's controls: series of distillations that differ in one thing (arXiv 2512.19941)."""
