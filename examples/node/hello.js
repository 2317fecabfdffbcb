// Hello, Settee: one durable document through the Node SDK.
import { readFileSync } from 'node:fs'
import couchbase from 'couchbase'

const password = process.env.SETTEE_PASSWORD ?? readFileSync('settee-data/password', 'utf8').trim()
const server = process.env.SETTEE_KV ?? '127.0.0.1:11210'
const cluster = await couchbase.connect(`couchbase://${server}`, { username: 'Administrator', password })
const docs = cluster.bucket('default').defaultCollection()

const stored = await docs.upsert('hello', { from: 'node' }, {
  durabilityLevel: couchbase.DurabilityLevel.PersistToMajority,
})
console.log('on disk, cas', stored.cas.toString())
console.log('read back', (await docs.get('hello')).content)
await cluster.close()
