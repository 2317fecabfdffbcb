// A real server process through the official Node SDK.
import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { after, before, test } from 'node:test'
import couchbase from 'couchbase'

const { DurabilityLevel, LookupInSpec, MutateInSpec, StoreSemantics } = couchbase
const password = 'a test password'
const binary = process.env.SETTEE_BIN ?? new URL('../../../target/release/settee', import.meta.url).pathname
const directory = mkdtempSync(join(tmpdir(), 'settee-node-'))

let server, cluster, docs
let keys = 0
const key = () => `node-${++keys}`

async function start() {
  const args = ['serve', '--data-dir', directory, '--kv', '127.0.0.1:0', '--admin', '127.0.0.1:0', '--set', 'bucket.vbuckets=64']
  const child = spawn(binary, args, {
    env: { ...process.env, SETTEE_PASSWORD: password },
    stdio: ['ignore', 'pipe', 'inherit'],
  })
  for await (const line of createInterface({ input: child.stdout })) {
    if (line.startsWith('ready ')) return { child, kv: /kv=(\S+)/.exec(line)[1] }
  }
  throw new Error('the server ended before it was ready')
}

before(async () => {
  server = await start()
  cluster = await couchbase.connect(`couchbase://${server.kv}`, { username: 'Administrator', password })
  docs = cluster.bucket('default').defaultCollection()
})

after(async () => {
  await cluster.close()
  server.child.kill('SIGTERM')
  const [code] = await once(server.child, 'exit')
  rmSync(directory, { recursive: true })
  assert.equal(code, 0)
})

test('documents with CAS', async () => {
  const k = key()
  const first = await docs.insert(k, { a: 1 })
  await assert.rejects(docs.insert(k, {}), couchbase.DocumentExistsError)
  const second = await docs.replace(k, { a: 2 }, { cas: first.cas })
  await assert.rejects(docs.replace(k, {}, { cas: first.cas }), couchbase.CasMismatchError)
  const got = await docs.get(k)
  assert.deepEqual(got.content, { a: 2 })
  assert.equal(got.cas.toString(), second.cas.toString())
  assert.equal((await docs.exists(k)).exists, true)
  await docs.remove(k, { cas: second.cas })
  await assert.rejects(docs.get(k), couchbase.DocumentNotFoundError)
  assert.equal((await docs.exists(k)).exists, false)
})

test('expiry, touch and locks', async () => {
  const k = key()
  await docs.upsert(k, 'v', { expiry: 3600 })
  const got = await docs.get(k, { withExpiry: true })
  assert.ok(Math.abs(got.expiryTime - Date.now() / 1000 - 3600) < 5)
  await docs.touch(k, 7200)
  assert.equal((await docs.getAndTouch(k, 60)).content, 'v')
  const locked = await docs.getAndLock(k, 15)
  await assert.rejects(docs.upsert(k, 'w', { timeout: 300 }))
  await docs.unlock(k, locked.cas)
  await docs.upsert(k, 'x')
})

test('counters, append and prepend', async () => {
  const k = key()
  assert.equal((await docs.binary().increment(k, 5, { initial: 10 })).value, 10)
  assert.equal((await docs.binary().increment(k, 5)).value, 15)
  assert.equal((await docs.binary().decrement(k, 100)).value, 0)
  const b = key()
  await docs.upsert(b, Buffer.from('b'))
  await docs.binary().append(b, Buffer.from('c'))
  await docs.binary().prepend(b, Buffer.from('a'))
  assert.equal((await docs.get(b)).content.toString(), 'abc')
})

test('parts of documents', async () => {
  const k = key()
  await docs.upsert(k, { name: 'Ada', likes: ['maths'], visits: 1 })
  await docs.mutateIn(k, [
    MutateInSpec.upsert('by.whom', 'node', { xattr: true, createPath: true }),
    MutateInSpec.arrayAppend('likes', 'engines'),
    MutateInSpec.increment('visits', 2),
    MutateInSpec.upsert('a.b.c', 1, { createPath: true }),
  ])
  const found = await docs.lookupIn(k, [
    LookupInSpec.get('by.whom', { xattr: true }),
    LookupInSpec.get('likes[-1]'),
    LookupInSpec.count('likes'),
    LookupInSpec.get('visits'),
    LookupInSpec.exists('nowhere'),
  ])
  assert.deepEqual(found.content.slice(0, 4).map((entry) => entry.value), ['node', 'engines', 2, 3])
  assert.equal(found.content[4].value, false)
  await assert.rejects(docs.mutateIn(k, [MutateInSpec.insert('name', 1)]), couchbase.PathExistsError)
  await docs.mutateIn(key(), [MutateInSpec.upsert('a', 1)], { storeSemantics: StoreSemantics.Upsert })
})

for (const level of ['Majority', 'MajorityAndPersistOnMaster', 'PersistToMajority']) {
  test(`durability level ${level}`, async () => {
    const k = key()
    const stored = await docs.upsert(k, { level }, { durabilityLevel: DurabilityLevel[level], timeout: 10_000 })
    assert.equal((await docs.get(k)).cas.toString(), stored.cas.toString())
    await docs.remove(k, { durabilityLevel: DurabilityLevel[level], timeout: 10_000 })
  })
}

test('many operations at once, and ping', async () => {
  const names = Array.from({ length: 500 }, (_, n) => `many-${n}`)
  await Promise.all(names.map((name, n) => docs.upsert(name, { n })))
  const got = await Promise.all(names.map((name) => docs.get(name)))
  assert.deepEqual(got.map((result) => result.content.n), names.map((_, n) => n))
  const report = await cluster.bucket('default').ping({ serviceTypes: [couchbase.ServiceType.KeyValue] })
  assert.ok(report.services.kv.every((endpoint) => endpoint.state === couchbase.PingState.Ok || endpoint.state === 'ok'))
})

test('a transaction changes all its documents or none', async () => {
  const [one, other] = [key(), key()]
  await docs.upsert(one, { n: 1 })
  await cluster.transactions().run(async (attempt) => {
    await attempt.replace(await attempt.get(docs, one), { n: 2 })
    await attempt.insert(docs, other, { n: 3 })
  })
  assert.deepEqual([(await docs.get(one)).content, (await docs.get(other)).content], [{ n: 2 }, { n: 3 }])
  const failing = cluster.transactions().run(async (attempt) => {
    await attempt.replace(await attempt.get(docs, one), { n: 9 })
    throw new Error('no')
  })
  await assert.rejects(failing, couchbase.TransactionFailedError)
  assert.deepEqual((await docs.get(one)).content, { n: 2 })
})

test('buckets come and go, and what is not here says so at once', async () => {
  const buckets = cluster.buckets()
  await buckets.createBucket({ name: 'visitor', ramQuotaMB: 100, numReplicas: 0, maxExpiry: 30, flushEnabled: true })
  await buckets.updateBucket({ name: 'visitor', ramQuotaMB: 120 })
  const settings = await buckets.getBucket('visitor')
  assert.deepEqual([settings.ramQuotaMB, settings.maxExpiry, settings.flushEnabled], [120, 30, true])
  await cluster.bucket('visitor').defaultCollection().upsert('k', 1)
  await buckets.flushBucket('visitor')
  assert.equal((await cluster.bucket('visitor').defaultCollection().exists('k')).exists, false)
  await buckets.dropBucket('visitor')
  await assert.rejects(buckets.dropBucket('visitor'), couchbase.BucketNotFoundError)
  await assert.rejects(cluster.query('select 1'), couchbase.ServiceNotAvailableError)
})
