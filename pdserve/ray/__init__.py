"""A deployment on a Ray cluster: `pdserve launch`, `pdserve scale`.

Ray places processes and keeps their supervisors alive; requests and KV never go through it. Only `actor` and `fleet`
import it.
"""
