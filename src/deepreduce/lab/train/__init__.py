"""Real training on real processes: the same model dense and by every codec, and what each of them cost.

A task (`tasks`) is data and defaults, and knows no framework. A worker is one module per framework (`torch_worker`), started once per rank
as ``python -m deepreduce.lab.train.FRAMEWORK_worker``; what it is given and what it answers is said in `contract`. The `launcher` starts
the workers, on shaped links (`links`) if asked, and collects an outcome.
"""
