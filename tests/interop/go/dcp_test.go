package interop

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/couchbase/gocb/v2"
	"github.com/couchbase/gocbcore/v10"
	"github.com/couchbase/gocbcore/v10/memd"
)

const vbuckets = 16

// A place in one vBucket, as a consumer keeps it to go on from.
type place struct {
	uuid                      gocbcore.VbUUID
	seqno, snapStart, snapEnd uint64
}

// What a consumer has made of the changes it was told.
type replica struct {
	mu      sync.Mutex
	changed *sync.Cond
	docs    map[string]string
	places  [vbuckets]place
	told    int
	ends    int
	broken  error
}

func newReplica() *replica {
	r := &replica{docs: map[string]string{}}
	r.changed = sync.NewCond(&r.mu)
	return r
}

func (r *replica) change(vb uint16, seqno uint64, apply func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := &r.places[vb]
	if seqno <= p.seqno || seqno > p.snapEnd {
		r.broken = fmt.Errorf("vBucket %d: seqno %d after %d in a snapshot that ends at %d", vb, seqno, p.seqno, p.snapEnd)
	}
	p.seqno = seqno
	r.told++
	apply()
	r.changed.Broadcast()
}

func (r *replica) SnapshotMarker(m gocbcore.DcpSnapshotMarker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.places[m.VbID].snapStart, r.places[m.VbID].snapEnd = m.StartSeqNo, m.EndSeqNo
}

func (r *replica) Mutation(m gocbcore.DcpMutation) {
	key, value := string(m.Key), string(m.Value)
	r.change(m.VbID, m.SeqNo, func() { r.docs[key] = value })
}

func (r *replica) Deletion(d gocbcore.DcpDeletion) {
	key := string(d.Key)
	r.change(d.VbID, d.SeqNo, func() { delete(r.docs, key) })
}

func (r *replica) Expiration(e gocbcore.DcpExpiration) {
	key := string(e.Key)
	r.change(e.VbID, e.SeqNo, func() { delete(r.docs, key) })
}

func (r *replica) End(gocbcore.DcpStreamEnd, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ends++
	r.changed.Broadcast()
}

func (r *replica) SeqNoAdvanced(a gocbcore.DcpSeqNoAdvanced) {
	r.change(a.VbID, a.SeqNo, func() {})
}

func (r *replica) CreateCollection(gocbcore.DcpCollectionCreation)     {}
func (r *replica) DeleteCollection(gocbcore.DcpCollectionDeletion)     {}
func (r *replica) FlushCollection(gocbcore.DcpCollectionFlush)         {}
func (r *replica) CreateScope(gocbcore.DcpScopeCreation)               {}
func (r *replica) DeleteScope(gocbcore.DcpScopeDeletion)               {}
func (r *replica) ModifyCollection(gocbcore.DcpCollectionModification) {}
func (r *replica) OSOSnapshot(gocbcore.DcpOSOSnapshot)                 {}

// Waits until the replica is as expected.
func (r *replica) await(t *testing.T, what string, is func() bool) {
	t.Helper()
	late := time.AfterFunc(20*time.Second, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.broken = errors.Join(r.broken, fmt.Errorf("not within 20 s: %s; it has %d documents", what, len(r.docs)))
		r.changed.Broadcast()
	})
	defer late.Stop()
	r.mu.Lock()
	defer r.mu.Unlock()
	for !is() && r.broken == nil {
		r.changed.Wait()
	}
	if r.broken != nil {
		t.Fatal(r.broken)
	}
}

func (r *replica) awaitDocs(t *testing.T, what string, expected map[string]string) {
	t.Helper()
	r.await(t, what, func() bool { return maps.Equal(r.docs, expected) })
}

// An agent, and how to close it; it is closed at the end of the test if it was not before.
func dcpAgent(t *testing.T, s *server, name string) (*gocbcore.DCPAgent, func() error) {
	t.Helper()
	config := gocbcore.DCPAgentConfig{
		BucketName: "default",
		IoConfig:   gocbcore.IoConfig{UseCollections: true},
		DCPConfig:  gocbcore.DCPConfig{UseExpiryOpcode: true, BufferSize: 1 << 20},
		SecurityConfig: gocbcore.SecurityConfig{
			Auth: gocbcore.PasswordAuthProvider{Username: "Administrator", Password: password},
		},
		EnableCCCPPoller: true,
	}
	if err := config.FromConnStr("couchbase://" + s.kv); err != nil {
		t.Fatal(err)
	}
	flags := memd.DcpOpenFlagProducer | memd.DcpOpenFlagIncludeDeleteTimes
	agent := must[*gocbcore.DCPAgent](t)(gocbcore.CreateDcpAgent(&config, name, flags))
	closed := sync.OnceValue(agent.Close)
	t.Cleanup(func() { _ = closed() })
	done := make(chan error, 1)
	_, err := agent.WaitUntilReady(time.Now().Add(20*time.Second), gocbcore.WaitUntilReadyOptions{},
		func(_ *gocbcore.WaitUntilReadyResult, err error) { done <- err })
	if err == nil {
		err = <-done
	}
	if err != nil {
		t.Fatal(err)
	}
	return agent, closed
}

// Opens the stream of one vBucket where the place says; returns the vBucket's histories.
func openStream(agent *gocbcore.DCPAgent, vb uint16, p place, r *replica, opts gocbcore.OpenStreamOptions) ([]gocbcore.FailoverEntry, error) {
	type opened struct {
		log []gocbcore.FailoverEntry
		err error
	}
	done := make(chan opened, 1)
	_, err := agent.OpenStream(vb, 0, p.uuid, gocbcore.SeqNo(p.seqno), gocbcore.SeqNo(^uint64(0)),
		gocbcore.SeqNo(p.snapStart), gocbcore.SeqNo(p.snapEnd), r, opts,
		func(log []gocbcore.FailoverEntry, err error) { done <- opened{log, err} })
	if err != nil {
		return nil, err
	}
	answer := <-done
	return answer.log, answer.err
}

func openAll(t *testing.T, agent *gocbcore.DCPAgent, r *replica, from [vbuckets]place) {
	t.Helper()
	r.mu.Lock()
	r.places = from
	r.mu.Unlock()
	for vb := range uint16(vbuckets) {
		log, err := openStream(agent, vb, from[vb], r, gocbcore.OpenStreamOptions{})
		if err != nil {
			t.Fatalf("vBucket %d: %v", vb, err)
		}
		r.mu.Lock()
		r.places[vb].uuid = log[0].VbUUID
		r.mu.Unlock()
	}
}

// A consumer sees everything there is, follows what comes, goes on after a reconnect with what it missed and no more, and
// sees it all again from the files after a restart.
func TestDcpAgentFollowsABucket(t *testing.T) {
	dir := t.TempDir()
	s := must[*server](t)(start(dir, "bucket.vbuckets=16"))
	t.Cleanup(func() { _ = s.cmd.Process.Kill() })
	cluster, docs, err := s.connect()
	if err != nil {
		t.Fatal(err)
	}
	expected := map[string]string{}
	write := func(from, to int) {
		t.Helper()
		for n := from; n < to; n++ {
			key, value := fmt.Sprintf("doc-%d", n), fmt.Sprintf(`{"n":%d}`, n)
			must[*gocb.MutationResult](t)(docs.Upsert(key, map[string]int{"n": n}, nil))
			expected[key] = value
			if n%5 == 0 {
				must[*gocb.MutationResult](t)(docs.Remove(key, nil))
				delete(expected, key)
			}
		}
	}
	write(0, 400)

	agent, closed := dcpAgent(t, s, "follower")
	first := newReplica()
	openAll(t, agent, first, [vbuckets]place{})
	first.awaitDocs(t, "everything", expected)
	write(400, 500)
	first.awaitDocs(t, "what came meanwhile", expected)
	durable := &gocb.UpsertOptions{DurabilityLevel: gocb.DurabilityLevelPersistToMajority}
	must[*gocb.MutationResult](t)(docs.Upsert("durable", map[string]int{"n": 0}, durable))
	expected["durable"] = `{"n":0}`
	first.awaitDocs(t, "a sync write, once it is committed", expected)

	if err := closed(); err != nil {
		t.Fatal(err)
	}
	first.await(t, "the streams to end", func() bool { return first.ends == vbuckets })
	write(500, 540)
	agent, _ = dcpAgent(t, s, "follower")
	second := newReplica()
	second.docs = maps.Clone(first.docs)
	openAll(t, agent, second, first.places)
	second.awaitDocs(t, "what it missed", expected)
	if second.told > 2*40+vbuckets {
		t.Fatalf("told %d changes again that it had", second.told)
	}

	_, err = openStream(agent, 3, place{}, newReplica(), gocbcore.OpenStreamOptions{})
	if !errors.Is(err, gocbcore.ErrDocumentExists) {
		t.Fatalf("two streams of one vBucket: %v", err)
	}
	other, _ := dcpAgent(t, s, "stranger")
	p := second.places[3]
	p.uuid = 1
	var rollback gocbcore.DCPRollbackError
	if _, err = openStream(other, 3, p, newReplica(), gocbcore.OpenStreamOptions{}); !errors.As(err, &rollback) {
		t.Fatalf("another history was accepted: %v", err)
	}
	if rollback.SeqNo != 0 {
		t.Fatalf("nothing is shared with another history, not what is before %d", rollback.SeqNo)
	}
	filtered := newReplica()
	filter := &gocbcore.OpenStreamFilterOptions{CollectionIDs: []uint32{0}}
	if _, err = openStream(other, 3, place{}, filtered, gocbcore.OpenStreamOptions{FilterOptions: filter}); err != nil {
		t.Fatal(err)
	}
	filtered.await(t, "one collection", func() bool { return filtered.places[3].seqno == second.places[3].seqno })

	_ = cluster.Close(nil)
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	if err := s.cmd.Wait(); err != nil {
		t.Fatal("the server did not stop cleanly: ", err)
	}
	s = must[*server](t)(start(dir, "bucket.vbuckets=16"))
	third := newReplica()
	agent, _ = dcpAgent(t, s, "late")
	openAll(t, agent, third, [vbuckets]place{})
	third.awaitDocs(t, "everything from the files", expected)
	fourth := newReplica()
	fourth.docs = maps.Clone(second.docs)
	agent, _ = dcpAgent(t, s, "follower")
	openAll(t, agent, fourth, second.places)
	if cluster, docs, err = s.connect(); err != nil {
		t.Fatal(err)
	}
	defer cluster.Close(nil)
	write(540, 560)
	fourth.awaitDocs(t, "what came after a clean restart", expected)
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	_ = s.cmd.Wait()
}
