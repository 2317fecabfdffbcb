package interop

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/couchbase/gocb/v2"
)

// nodes run under `settee cluster-run`, and end with it.
type nodes struct {
	cmd *exec.Cmd
	kv  []string
	pid []string
}

func startNodes(t *testing.T, count, replicas int) *nodes {
	t.Helper()
	cmd := exec.Command(binary(), "cluster-run", "--data-dir", t.TempDir(), "--base-port", "0", "--vbuckets", "64",
		"--nodes", fmt.Sprint(count), "--replicas", fmt.Sprint(replicas))
	cmd.Env = append(os.Environ(), "SETTEE_PASSWORD="+password)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	n := &nodes{cmd: cmd}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGINT)
		if err := cmd.Wait(); err != nil {
			t.Error("the nodes did not stop cleanly:", err)
		}
	})
	node := regexp.MustCompile(`^node .*kv=(\S+).*pid=(\d+)`)
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if found := node.FindStringSubmatch(lines.Text()); found != nil {
			n.kv, n.pid = append(n.kv, found[1]), append(n.pid, found[2])
		}
		if strings.HasPrefix(lines.Text(), "ready ") {
			go func() {
				for lines.Scan() {
				}
			}()
			return n
		}
	}
	t.Fatal("the nodes ended before they were ready")
	return nil
}

// A replica has the commit a moment after the client has the answer.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for until := time.Now().Add(time.Minute); !holds(); {
		if time.Now().After(until) {
			t.Fatal("never: ", what)
		}
	}
}

func TestNodesAreUsedLikeOneServerAndOneMayGo(t *testing.T) {
	for _, size := range []struct{ nodes, replicas int }{{2, 1}, {3, 2}} {
		t.Run(fmt.Sprintf("%d nodes", size.nodes), func(t *testing.T) {
			n := startNodes(t, size.nodes, size.replicas)
			cluster, docs, err := (&server{kv: strings.Join(n.kv, ",")}).connect()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = cluster.Close(nil) }()
			levels := []gocb.DurabilityLevel{
				gocb.DurabilityLevelMajority,
				gocb.DurabilityLevelMajorityAndPersistOnMaster,
				gocb.DurabilityLevelPersistToMajority,
			}
			const count = 90
			name := func(i int) string { return fmt.Sprintf("n-%d", i) }
			for i := range count {
				must[*gocb.MutationResult](t)(docs.Upsert(name(i), i, &gocb.UpsertOptions{DurabilityLevel: levels[i%3]}))
			}
			for i := range 20 {
				eventually(t, "every replica has "+name(i), func() bool {
					copies := must[*gocb.GetAllReplicasResult](t)(docs.GetAllReplicas(name(i), nil))
					replicas := 0
					for doc := copies.Next(); doc != nil; doc = copies.Next() {
						var value int
						if err := doc.Content(&value); err != nil || value != i {
							t.Fatal(name(i), value, err)
						}
						if doc.IsReplica() {
							replicas++
						}
					}
					return replicas == size.replicas
				})
			}
			if err := exec.Command("kill", "-9", n.pid[0]).Run(); err != nil {
				t.Fatal(err)
			}
			failover := exec.Command(binary(), "cluster", "failover", n.kv[0], "--kv", n.kv[1])
			failover.Env = append(os.Environ(), "SETTEE_PASSWORD="+password)
			if out, err := failover.CombinedOutput(); err != nil {
				t.Fatal(string(out), err)
			}
			// What was queued for the lost node before the client had the new map runs out of time.
			for i := range count {
				var value int
				eventually(t, name(i)+" is read again", func() bool {
					got, err := docs.Get(name(i), &gocb.GetOptions{Timeout: 2 * time.Second})
					if errors.Is(err, gocb.ErrTimeout) {
						return false
					}
					if err != nil {
						t.Fatal(name(i), err)
					}
					return got.Content(&value) == nil
				})
				if value != i {
					t.Fatal(name(i), value)
				}
			}
			// Three nodes less one are a majority still; of two less one nobody is.
			_, err = docs.Upsert("after", 1, &gocb.UpsertOptions{DurabilityLevel: gocb.DurabilityLevelPersistToMajority})
			if size.nodes == 3 && err != nil {
				t.Fatal(err)
			}
			if size.nodes == 2 {
				wants(t, err, gocb.ErrDurabilityImpossible)
			}
		})
	}
}
