package histories

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/couchbase/gocbcore/v10/memd"
)

const (
	vbuckets = 8
	// startMax is how long a node may take to serve, to end, and to do what a coordinator asks for.
	startMax = 20 * time.Second
)

// State of a vBucket, as SET_VBUCKET has it.
const (
	active  = 1
	replica = 2
	dead    = 4
)

// node is a server that may be down.
type node struct {
	*place
	dir       string
	kv, admin string
	cmd       *exec.Cmd
}

// program is the server to test.
func program() string {
	if path := os.Getenv("SETTEE_BIN"); path != "" {
		return path
	}
	path, err := filepath.Abs("../../target/release/settee")
	if err != nil {
		panic(err)
	}
	return path
}

var ready = regexp.MustCompile(`^ready kv=(\S+) admin=(\S+)`)

// start returns when the node serves.
func (n *node) start() error {
	cmd := n.command(program(), "serve", "--bucket=", "--data-dir", filepath.Join(n.dir, "data"), "--kv", n.kv,
		"--admin", n.admin, "--user", user, "--set", "auth.scram_iterations=4096")
	cmd.Env = append(os.Environ(), "SETTEE_PASSWORD="+password)
	log, err := os.OpenFile(n.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	cmd.Stderr = log
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	n.cmd = cmd
	late := time.AfterFunc(startMax, n.kill)
	defer late.Stop()
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if found := ready.FindStringSubmatch(lines.Text()); found != nil {
			n.kv, n.admin = found[1], found[2]
			return nil
		}
	}
	return fmt.Errorf("node %d ended before it served: %w", n.number, cmd.Wait())
}

func (n *node) log() string {
	return filepath.Join(n.dir, "log")
}

func (n *node) signal(signal syscall.Signal) {
	_ = n.cmd.Process.Signal(signal)
}

// kill ends the node as kill -9 does.
func (n *node) kill() {
	n.signal(syscall.SIGKILL)
}

// gone waits for its end, and tells how it ended.
func (n *node) gone() error {
	late := time.AfterFunc(startMax, n.kill)
	defer late.Stop()
	return n.cmd.Wait()
}

// cluster is some nodes and the newest map of where the vBuckets are.
type cluster struct {
	nodes    []*node
	replicas int

	mu sync.Mutex
	// chains names, for each vBucket, the places of its nodes in `nodes`, active first.
	chains [][]int
	rev    int64
	isOut  []bool
	terms  []int
}

// layout names the first node of a vBucket's chain.
type layout func(vb, nodes int) int

func spread(vb, nodes int) int { return vb % nodes }
func firstHasAll(_, _ int) int { return 0 }

var clusters atomic.Int32

// newCluster starts nodes and lays a bucket out on them.
func newCluster(dir string, nodes, replicas int, first layout) (*cluster, error) {
	id := int(clusters.Add(1))
	c := &cluster{replicas: replicas, isOut: make([]bool, nodes), terms: make([]int, nodes)}
	for number := range nodes {
		place, err := newPlace(id, number)
		if err != nil {
			return c, err
		}
		n := &node{place: place, dir: filepath.Join(dir, fmt.Sprint(number))}
		n.kv, n.admin = n.host()+":0", n.host()+":0"
		c.nodes = append(c.nodes, n)
		if err := os.MkdirAll(n.dir, 0o700); err != nil {
			return c, err
		}
		if err := n.start(); err != nil {
			return c, err
		}
	}
	for vb := range vbuckets {
		var chain []int
		for at := range replicas + 1 {
			chain = append(chain, (first(vb, nodes)+at)%nodes)
		}
		c.chains = append(c.chains, chain)
	}
	return c, c.layOut()
}

// stop ends all nodes that run, in order.
func (c *cluster) stop() error {
	var failed error
	for _, n := range c.nodes {
		if n.cmd != nil && n.cmd.ProcessState == nil {
			n.signal(syscall.SIGCONT)
			n.signal(syscall.SIGTERM)
			if err := n.gone(); err != nil {
				failed = fmt.Errorf("node %d did not stop cleanly: %w", n.number, err)
			}
		}
		n.leave()
	}
	return failed
}

// restart starts a node that has ended again, with what is on its disk.
func (c *cluster) restart(number int) error {
	_ = c.nodes[number].gone()
	return c.start(number)
}

// start starts a node that is known to have ended.
func (c *cluster) start(number int) error {
	c.begin(number)
	return c.nodes[number].start()
}

// begin begins a new term of a node.
func (c *cluster) begin(number int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.terms[number]++
}

// where returns the chain of a vBucket, active first, by the newest map.
func (c *cluster) where(vb int) []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.chains[vb]
}

// office tells the term of a node, and whether it is out of the map.
func (c *cluster) office(number int) (int, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.terms[number], c.isOut[number]
}

// failOver takes a node out of the map, as somebody who stands at another node would. From its beginning on, what the lost one
// says of the present does not count.
func (c *cluster) failOver(lost, through int) error {
	c.mu.Lock()
	c.isOut[lost] = true
	for number := range c.terms {
		c.terms[number]++
	}
	c.mu.Unlock()
	if err := c.decide(through, "failover", c.nodes[lost].kv); err != nil {
		return err
	}
	return c.learn(through)
}

// takeIn gives a node that is out of office, and knows it, vBuckets again.
func (c *cluster) takeIn(lost, through int) error {
	if err := c.decide(through, "add", c.nodes[lost].kv); err != nil {
		return err
	}
	c.mu.Lock()
	c.isOut[lost] = false
	c.mu.Unlock()
	if err := c.decide(through, "rebalance"); err != nil {
		return err
	}
	return c.learn(through)
}

// decide runs a command of `settee cluster` at a node.
func (c *cluster) decide(through int, verb ...string) error {
	at := c.nodes[through]
	args := append(append([]string{"cluster"}, verb...), "--kv", at.kv, "--user", user, "--data-dir", at.dir)
	cmd := at.command(program(), args...)
	cmd.Env = append(os.Environ(), "SETTEE_PASSWORD="+password)
	if said, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", verb[0], err, said)
	}
	return nil
}

// learn goes by the map that a node has, if it is newer.
func (c *cluster) learn(number int) error {
	client, err := dial(c.nodes[number].kv, bucket, startMax)
	if err != nil {
		return err
	}
	defer client.close()
	answer, err := client.succeed(memd.Packet{Command: memd.CmdGetClusterConfig})
	if err != nil {
		return err
	}
	var config struct {
		Rev   int64
		Place struct {
			ServerList []string
			VBucketMap [][]int
		} `json:"vBucketServerMap"`
	}
	if err := json.Unmarshal(answer.Value, &config); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if config.Rev <= c.rev {
		return nil
	}
	c.rev = config.Rev
	for vb, row := range config.Place.VBucketMap {
		var chain []int
		for _, at := range row {
			if at >= 0 {
				chain = append(chain, c.named(config.Place.ServerList[at]))
			}
		}
		// Of one that is active nowhere the replicas are asked, who will say so.
		c.chains[vb] = chain
	}
	return nil
}

func (c *cluster) named(kv string) int {
	for number, n := range c.nodes {
		if n.kv == kv {
			return number
		}
	}
	panic("no node is called " + kv)
}

// layOut does what `settee cluster-run` does at its first start, with the same verbs.
func (c *cluster) layOut() error {
	var config map[string]any
	var listed, servers []any
	for _, n := range c.nodes {
		alone, err := n.makeBucket(c.replicas)
		if err != nil {
			return err
		}
		entry := alone["nodesExt"].([]any)[0].(map[string]any)
		delete(entry, "thisNode")
		entry["hostname"] = n.host()
		listed, servers = append(listed, entry), append(servers, n.kv)
		config = alone
	}
	rev := config["rev"].(float64) + 10
	config["rev"], config["nodesExt"] = rev, listed
	config["vBucketServerMap"] = map[string]any{
		"numReplicas": c.replicas, "vBucketMap": c.chains, "serverList": servers, "hashAlgorithm": "CRC",
	}
	for number, n := range c.nodes {
		if err := n.takeRoles(number, c); err != nil {
			return err
		}
	}
	for number, n := range c.nodes {
		entry := listed[number].(map[string]any)
		entry["thisNode"] = true
		document, err := json.Marshal(config)
		delete(entry, "thisNode")
		if err != nil {
			return err
		}
		extras := binary.BigEndian.AppendUint64(nil, uint64(config["revEpoch"].(float64)))
		extras = binary.BigEndian.AppendUint64(extras, uint64(rev))
		request := memd.Packet{Command: setClusterConfig, Extras: extras, Key: []byte(bucket), Value: document}
		if err := n.as("", request); err != nil {
			return err
		}
	}
	return nil
}

// makeBucket returns the map of the new bucket, which knows this node only.
func (n *node) makeBucket(replicas int) (map[string]any, error) {
	spec := fmt.Sprintf("settee\x00max_size=%d;replicas=%d;max_vbuckets=%d", 64<<20, replicas, vbuckets)
	if err := n.as("", memd.Packet{Command: createBucket, Key: []byte(bucket), Value: []byte(spec)}); err != nil {
		return nil, err
	}
	client, err := dial(n.kv, bucket, startMax)
	if err != nil {
		return nil, err
	}
	defer client.close()
	answer, err := client.succeed(memd.Packet{Command: memd.CmdGetClusterConfig})
	if err != nil {
		return nil, err
	}
	config := map[string]any{}
	return config, json.Unmarshal(answer.Value, &config)
}

// takeRoles tells a node what its vBuckets are.
func (n *node) takeRoles(number int, c *cluster) error {
	for vb, chain := range c.chains {
		request := memd.Packet{Command: setVbucket, Vbucket: uint16(vb), Extras: []byte{dead}}
		var names []string
		for at, other := range chain {
			names = append(names, c.nodes[other].kv)
			if other == number {
				request.Extras[0] = replica
				if at == 0 {
					request.Extras[0] = active
				}
			}
		}
		if request.Extras[0] == active {
			topology, err := json.Marshal(map[string]any{"topology": [][]string{names}})
			if err != nil {
				return err
			}
			request.Value = topology
		}
		if err := n.as(bucket, request); err != nil {
			return err
		}
	}
	return nil
}

// as makes a connection for one request.
func (n *node) as(bucket string, request memd.Packet) error {
	client, err := dial(n.kv, bucket, startMax)
	if err != nil {
		return err
	}
	defer client.close()
	_, err = client.succeed(request)
	return err
}

// logs returns the last lines that every node said.
func (c *cluster) logs() string {
	var text strings.Builder
	for _, n := range c.nodes {
		said, _ := os.ReadFile(n.log())
		lines := strings.Split(strings.TrimSpace(string(said)), "\n")
		lines = lines[max(0, len(lines)-25):]
		fmt.Fprintf(&text, "node %d (%s):\n  %s\n", n.number, n.kv, strings.Join(lines, "\n  "))
	}
	return text.String()
}
