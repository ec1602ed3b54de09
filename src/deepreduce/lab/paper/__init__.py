"""The paper's evaluation: every figure and table of its section 6 and appendix 11 as one short file, run by `deepreduce paper`.

A figure's file says what is trained or measured and what the claims are; `printed` has all numbers of the paper; `scales` says how much is
trained; `conduct` trains what `store` does not hold yet; `results` and `page` write what came of it.
"""
