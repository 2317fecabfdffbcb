// Package interop drives a real server process through gocb.
package interop

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/couchbase/gocb/v2"
)

const password = "a test password"

type server struct {
	cmd *exec.Cmd
	kv  string
}

func binary() string {
	if named := os.Getenv("SETTEE_BIN"); named != "" {
		return named
	}
	return "../../../target/release/settee"
}

func start(dir string, settings ...string) (*server, error) {
	args := []string{"serve", "--data-dir", dir, "--kv", "127.0.0.1:0", "--admin", "127.0.0.1:0"}
	for _, setting := range settings {
		args = append(args, "--set", setting)
	}
	cmd := exec.Command(binary(), args...)
	cmd.Env = append(os.Environ(), "SETTEE_PASSWORD="+password)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "ready ") {
			kv := regexp.MustCompile(`kv=(\S+)`).FindStringSubmatch(lines.Text())[1]
			go func() {
				for lines.Scan() {
				}
			}()
			return &server{cmd, kv}, nil
		}
	}
	return nil, fmt.Errorf("the server ended before it was ready: %w", cmd.Wait())
}

func (s *server) connect() (*gocb.Cluster, *gocb.Collection, error) {
	cluster, err := gocb.Connect("couchbase://"+s.kv, gocb.ClusterOptions{
		Authenticator:  gocb.PasswordAuthenticator{Username: "Administrator", Password: password},
		TimeoutsConfig: gocb.TimeoutsConfig{KVTimeout: 10 * time.Second, KVDurableTimeout: 20 * time.Second},
	})
	if err != nil {
		return nil, nil, err
	}
	bucket := cluster.Bucket("default")
	if err := bucket.WaitUntilReady(20*time.Second, nil); err != nil {
		return nil, nil, err
	}
	return cluster, bucket.DefaultCollection(), nil
}

var (
	docs   *gocb.Collection
	shared *gocb.Cluster
	keys   int
	keysMu sync.Mutex
)

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "settee-go-")
	if err != nil {
		panic(err)
	}
	s, err := start(dir, "bucket.vbuckets=64")
	if err != nil {
		panic(err)
	}
	shared, docs, err = s.connect()
	if err != nil {
		panic(err)
	}
	code := m.Run()
	_ = shared.Close(nil)
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	if err := s.cmd.Wait(); err != nil {
		fmt.Println("the server did not stop cleanly:", err)
		code = 1
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

func key() string {
	keysMu.Lock()
	defer keysMu.Unlock()
	keys++
	return fmt.Sprintf("go-%d", keys)
}

func must[T any](t *testing.T) func(T, error) T {
	return func(value T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func wants(t *testing.T, err, expected error) {
	t.Helper()
	if !errors.Is(err, expected) {
		t.Fatalf("expected %v, got %v", expected, err)
	}
}

type person struct {
	Name  string   `json:"name"`
	Age   int      `json:"age"`
	Likes []string `json:"likes,omitempty"`
}

func TestDocumentsWithCas(t *testing.T) {
	k := key()
	mutated := must[*gocb.MutationResult](t)
	first := mutated(docs.Insert(k, person{Name: "Ada", Age: 36}, nil))
	_, err := docs.Insert(k, person{}, nil)
	wants(t, err, gocb.ErrDocumentExists)
	second := mutated(docs.Replace(k, person{Name: "Ada", Age: 37}, &gocb.ReplaceOptions{Cas: first.Cas()}))
	_, err = docs.Replace(k, person{}, &gocb.ReplaceOptions{Cas: first.Cas()})
	wants(t, err, gocb.ErrCasMismatch)
	var got person
	result := must[*gocb.GetResult](t)(docs.Get(k, nil))
	if err := result.Content(&got); err != nil || got.Age != 37 || result.Cas() != second.Cas() {
		t.Fatalf("%+v %v %v", got, result.Cas(), err)
	}
	if second.MutationToken() == nil || second.MutationToken().SequenceNumber() <= first.MutationToken().SequenceNumber() {
		t.Fatal("tokens grow")
	}
	mutated(docs.Remove(k, &gocb.RemoveOptions{Cas: second.Cas()}))
	_, err = docs.Get(k, nil)
	wants(t, err, gocb.ErrDocumentNotFound)
	_, err = docs.Replace(k, person{}, nil)
	wants(t, err, gocb.ErrDocumentNotFound)
	exists := must[*gocb.ExistsResult](t)(docs.Exists(k, nil))
	if exists.Exists() {
		t.Fatal("a removed document does not exist")
	}
}

func TestExpiryTouchAndLock(t *testing.T) {
	k := key()
	must[*gocb.MutationResult](t)(docs.Upsert(k, "v", &gocb.UpsertOptions{Expiry: time.Hour}))
	got := must[*gocb.GetResult](t)(docs.Get(k, &gocb.GetOptions{WithExpiry: true}))
	if left := time.Until(got.ExpiryTime()); left < 59*time.Minute || left > 61*time.Minute {
		t.Fatal(left)
	}
	must[*gocb.MutationResult](t)(docs.Touch(k, 2*time.Hour, nil))
	must[*gocb.GetResult](t)(docs.GetAndTouch(k, 3*time.Hour, nil))
	must[*gocb.MutationResult](t)(docs.Upsert(k, "w", &gocb.UpsertOptions{PreserveExpiry: true}))
	got = must[*gocb.GetResult](t)(docs.Get(k, &gocb.GetOptions{WithExpiry: true}))
	if left := time.Until(got.ExpiryTime()); left < 179*time.Minute {
		t.Fatal(left)
	}
	locked := must[*gocb.GetResult](t)(docs.GetAndLock(k, 15*time.Second, nil))
	_, err := docs.Upsert(k, "x", &gocb.UpsertOptions{Timeout: 300 * time.Millisecond})
	if err == nil {
		t.Fatal("a locked document was written")
	}
	if err := docs.Unlock(k, locked.Cas(), nil); err != nil {
		t.Fatal(err)
	}
	must[*gocb.MutationResult](t)(docs.Upsert(k, "y", nil))
}

func TestCountersAppendAndPrepend(t *testing.T) {
	k := key()
	binary := docs.Binary()
	_, err := binary.Increment(k, &gocb.IncrementOptions{Delta: 1, Initial: -1})
	wants(t, err, gocb.ErrDocumentNotFound)
	for _, expected := range []uint64{100, 107} {
		got := must[*gocb.CounterResult](t)(binary.Increment(k, &gocb.IncrementOptions{Delta: 7, Initial: 100}))
		if got.Content() != expected {
			t.Fatal(got.Content())
		}
	}
	got := must[*gocb.CounterResult](t)(binary.Decrement(k, &gocb.DecrementOptions{Delta: 1000, Initial: -1}))
	if got.Content() != 0 {
		t.Fatal(got.Content())
	}
	k = key()
	raw := gocb.NewRawBinaryTranscoder()
	must[*gocb.MutationResult](t)(docs.Upsert(k, []byte("b"), &gocb.UpsertOptions{Transcoder: raw}))
	must[*gocb.MutationResult](t)(binary.Append(k, []byte("c"), nil))
	must[*gocb.MutationResult](t)(binary.Prepend(k, []byte("a"), nil))
	var joined []byte
	result := must[*gocb.GetResult](t)(docs.Get(k, &gocb.GetOptions{Transcoder: raw}))
	if err := result.Content(&joined); err != nil || string(joined) != "abc" {
		t.Fatal(string(joined), err)
	}
}

func TestSubDocuments(t *testing.T) {
	k := key()
	must[*gocb.MutationResult](t)(docs.Upsert(k, person{Name: "Ada", Age: 36, Likes: []string{"maths"}}, nil))
	changed := must[*gocb.MutateInResult](t)(docs.MutateIn(k, []gocb.MutateInSpec{
		gocb.UpsertSpec("address.city", "London", &gocb.UpsertSpecOptions{CreatePath: true}),
		gocb.ArrayAppendSpec("likes", "engines", nil),
		gocb.ArrayAppendSpec("likes", []string{"poetry", "horses"}, &gocb.ArrayAppendSpecOptions{HasMultiple: true}),
		gocb.IncrementSpec("age", 1, nil),
		gocb.UpsertSpec("meta.by", "go", &gocb.UpsertSpecOptions{CreatePath: true, IsXattr: true}),
		gocb.UpsertSpec("meta.cas", gocb.MutationMacroCAS, &gocb.UpsertSpecOptions{IsXattr: true}),
	}, nil))
	found := must[*gocb.LookupInResult](t)(docs.LookupIn(k, []gocb.LookupInSpec{
		gocb.GetSpec("meta.by", &gocb.GetSpecOptions{IsXattr: true}),
		gocb.GetSpec("$document.CAS", &gocb.GetSpecOptions{IsXattr: true}),
		gocb.GetSpec("likes[-1]", nil),
		gocb.CountSpec("likes", nil),
		gocb.ExistsSpec("nowhere", nil),
		gocb.GetSpec("age", nil),
	}, nil))
	var by, cas, last string
	var count, age int
	for i, into := range []any{&by, &cas, &last, &count} {
		if err := found.ContentAt(uint(i), into); err != nil {
			t.Fatal(i, err)
		}
	}
	if err := found.ContentAt(5, &age); err != nil {
		t.Fatal(err)
	}
	if by != "go" || cas != fmt.Sprintf("0x%016x", uint64(changed.Cas())) || last != "horses" || count != 4 || age != 37 || found.Exists(4) {
		t.Fatal(by, cas, last, count, age)
	}
	_, err := docs.MutateIn(k, []gocb.MutateInSpec{gocb.InsertSpec("name", "x", nil)}, nil)
	wants(t, err, gocb.ErrPathExists)
	_, err = docs.MutateIn(k, []gocb.MutateInSpec{gocb.ReplaceSpec("no.such", "x", nil)}, nil)
	wants(t, err, gocb.ErrPathNotFound)
	_, err = docs.MutateIn(key(), []gocb.MutateInSpec{gocb.UpsertSpec("a", 1, nil)}, nil)
	wants(t, err, gocb.ErrDocumentNotFound)
	must[*gocb.MutateInResult](t)(docs.MutateIn(key(), []gocb.MutateInSpec{gocb.UpsertSpec("a", 1, nil)},
		&gocb.MutateInOptions{StoreSemantic: gocb.StoreSemanticsUpsert}))
}

func TestDurabilityLevels(t *testing.T) {
	for _, level := range []gocb.DurabilityLevel{
		gocb.DurabilityLevelMajority,
		gocb.DurabilityLevelMajorityAndPersistOnMaster,
		gocb.DurabilityLevelPersistToMajority,
	} {
		k := key()
		stored := must[*gocb.MutationResult](t)(docs.Upsert(k, 1, &gocb.UpsertOptions{DurabilityLevel: level}))
		got := must[*gocb.GetResult](t)(docs.Get(k, nil))
		if got.Cas() != stored.Cas() {
			t.Fatalf("the CAS of a committed write is its prepare's: %v %v", got.Cas(), stored.Cas())
		}
		must[*gocb.MutateInResult](t)(docs.MutateIn(k+"d", []gocb.MutateInSpec{gocb.UpsertSpec("a", 1, nil)},
			&gocb.MutateInOptions{StoreSemantic: gocb.StoreSemanticsUpsert, DurabilityLevel: level}))
		must[*gocb.MutationResult](t)(docs.Remove(k, &gocb.RemoveOptions{DurabilityLevel: level}))
	}
}

func TestBulkOperationsAndPing(t *testing.T) {
	var ops []gocb.BulkOp
	for n := 0; n < 300; n++ {
		ops = append(ops, &gocb.UpsertOp{ID: fmt.Sprintf("bulk-%d", n), Value: n})
	}
	if err := docs.Do(ops, nil); err != nil {
		t.Fatal(err)
	}
	for _, op := range ops {
		if err := op.(*gocb.UpsertOp).Err; err != nil {
			t.Fatal(err)
		}
	}
	report, err := shared.Bucket("default").Ping(&gocb.PingOptions{ServiceTypes: []gocb.ServiceType{gocb.ServiceTypeKeyValue}})
	if err != nil {
		t.Fatal(err)
	}
	for _, endpoint := range report.Services[gocb.ServiceTypeKeyValue] {
		if endpoint.State != gocb.PingStateOk {
			t.Fatal(endpoint)
		}
	}
}

func TestTransactionsOnOneDocumentComeOneAfterTheOther(t *testing.T) {
	k := key()
	must[*gocb.MutationResult](t)(docs.Upsert(k, map[string]int{"n": 0}, nil))
	increment := func(attempt *gocb.TransactionAttemptContext) error {
		found, err := attempt.Get(docs, k)
		if err != nil {
			return err
		}
		var doc map[string]int
		if err := found.Content(&doc); err != nil {
			return err
		}
		doc["n"]++
		_, err = attempt.Replace(found, doc)
		return err
	}
	options := &gocb.TransactionOptions{DurabilityLevel: gocb.DurabilityLevelPersistToMajority, Timeout: 60 * time.Second}
	var wait sync.WaitGroup
	failures := make(chan error, 12)
	for n := 0; n < 12; n++ {
		wait.Add(1)
		go func() {
			defer wait.Done()
			_, err := shared.Transactions().Run(increment, options)
			failures <- err
		}()
	}
	wait.Wait()
	for n := 0; n < 12; n++ {
		if err := <-failures; err != nil {
			t.Fatal(err)
		}
	}
	var doc map[string]int
	if err := must[*gocb.GetResult](t)(docs.Get(k, nil)).Content(&doc); err != nil || doc["n"] != 12 {
		t.Fatal(err, doc)
	}
}

func TestReplicaReadsWithoutReplicasReadTheDocument(t *testing.T) {
	k := key()
	must[*gocb.MutationResult](t)(docs.Upsert(k, 7, nil))
	if got := must[*gocb.GetReplicaResult](t)(docs.GetAnyReplica(k, nil)); got.IsReplica() {
		t.Fatal("there is no replica")
	}
	_, err := docs.GetAnyReplica(key(), nil)
	wants(t, err, gocb.ErrDocumentUnretrievable)
	_, err = docs.Scan(gocb.NewRangeScanForPrefix("x"), nil)
	wants(t, err, gocb.ErrFeatureNotAvailable)
	_, err = shared.Query("select 1", nil)
	wants(t, err, gocb.ErrServiceNotAvailable)
}
