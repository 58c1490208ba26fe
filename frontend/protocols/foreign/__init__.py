"""What the routes of TEI, vLLM, infinity and Cohere share over the flow of SIE: paths, bases of routes, errors.

May be imported by the packages of these servers, and by the arbiter's look at the configuration. Imports SIE.
"""
