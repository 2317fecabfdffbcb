package histories

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/couchbase/gocbcore/v10/memd"
)

const (
	clientCount = 8
	keyCount    = 64
	// pace is the pause between two requests of a client: what is looked for are orders, not speed.
	pace = 4 * time.Millisecond
	// pauseAfterFailure is longer, so that whoever cannot reach a node does not fill the history.
	pauseAfterFailure = 40 * time.Millisecond
)

// load is clients that ask a cluster for one thing after the other and write down what they were told.
type load struct {
	cluster *cluster
	levels  []uint8
	began   time.Time
	seed    uint64

	isOver   atomic.Bool
	versions atomic.Uint64
	// acknowledged counts durable writes.
	acknowledged atomic.Int64
	clients      sync.WaitGroup

	mu      sync.Mutex
	history []Op
	strange []error
}

func startLoad(c *cluster, seed uint64, levels ...uint8) *load {
	l := &load{cluster: c, levels: levels, began: time.Now(), seed: seed}
	for number := range clientCount {
		l.clients.Add(1)
		go func() {
			defer l.clients.Done()
			l.client(number).run()
		}()
	}
	return l
}

// end has the clients finish what they began.
func (l *load) end() {
	l.isOver.Store(true)
	l.clients.Wait()
}

func (l *load) now() int64 {
	return int64(time.Since(l.began))
}

// client is one of them. It swaps what it saw last.
type client struct {
	*load
	number int
	dice   *rand.Rand
	conns  map[int]*conn
	seen   map[string]Op
	ops    []Op
}

func (l *load) client(number int) *client {
	dice := rand.New(rand.NewPCG(l.seed, uint64(number)))
	return &client{load: l, number: number, dice: dice, conns: map[int]*conn{}, seen: map[string]Op{}}
}

func (c *client) run() {
	for !c.isOver.Load() {
		op, vb := c.draw()
		op = c.ask(c.node(op, vb), vb, op)
		switch op.Outcome {
		case Failed, Ambiguous:
			time.Sleep(pauseAfterFailure)
		default:
			time.Sleep(pace)
		}
	}
	c.leave()
}

func (c *client) leave() {
	for _, conn := range c.conns {
		conn.close()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.history = append(c.history, c.ops...)
}

// key and its vBucket.
func key(n int) (string, int) {
	return fmt.Sprintf("key-%d", n), n % vbuckets
}

func (c *client) draw() (Op, int) {
	name, vb := key(c.dice.IntN(keyCount))
	op := Op{Key: name, Level: c.levels[c.dice.IntN(len(c.levels))]}
	switch n := c.dice.IntN(100); {
	case n < 35:
		op.Kind, op.Level = Get, 0
	case n < 45:
		op.Kind, op.Level = Replica, 0
	case n < 65:
		op.Kind = Set
	case n < 85 && c.seen[name].Cas != 0:
		before := c.seen[name]
		op.Kind, op.Expects = Swap, max(before.Found, before.Writes)
	case n < 93:
		op.Kind = Add
	default:
		op.Kind = Delete
	}
	if op.Kind == Set || op.Kind == Swap || op.Kind == Add {
		op.Writes = Version(c.versions.Add(1))
	}
	return op, vb
}

// node is where the newest map sends a request. A few stray: to where the vBucket was, or will be.
func (c *client) node(op Op, vb int) int {
	chain := c.cluster.where(vb)
	switch {
	case c.dice.IntN(12) == 0:
		return c.dice.IntN(len(c.cluster.nodes))
	case op.Kind == Replica:
		return chain[c.dice.IntN(len(chain))]
	}
	return chain[0]
}

// ask asks a node and writes down what became of it.
func (c *client) ask(number, vb int, op Op) Op {
	node := c.cluster.nodes[number]
	op.Client, op.Node = c.number, node.kv
	op.Term, _ = c.cluster.office(number)
	op.Call = c.now()
	answer, sent, err := c.exchange(number, op.request(uint16(vb), c.seen[op.Key].Cas))
	op.Return = c.now()
	switch isRead := op.Kind == Get || op.Kind == Replica; {
	case err == nil:
		err = op.answered(answer)
		if err != nil {
			c.mu.Lock()
			c.strange = append(c.strange, err)
			c.mu.Unlock()
		}
	case sent && !isRead:
		op.Outcome, op.Why = Ambiguous, err.Error()
	default:
		op.Outcome, op.Why = Failed, err.Error()
	}
	_, op.IsStale = c.cluster.office(number)
	if op.Outcome == Done {
		c.remember(op)
	}
	if op.Why == notMine {
		// Whoever is turned away looks at the map.
		_ = c.cluster.learn(number)
	}
	c.ops = append(c.ops, op)
	return op
}

func (c *client) remember(op Op) {
	switch {
	case op.Kind == Replica:
	case op.Kind == Delete || op.Kind == Get && op.Found == 0:
		delete(c.seen, op.Key)
	default:
		c.seen[op.Key] = op
	}
	if op.Writes != 0 || op.Kind == Delete {
		c.acknowledged.Add(1)
	}
}

// exchange tells beside the answer whether the request may have reached the node.
func (c *client) exchange(number int, request memd.Packet) (*memd.Packet, bool, error) {
	to := c.conns[number]
	if to == nil {
		fresh, err := dial(c.cluster.nodes[number].kv, bucket, answerMax)
		if err != nil {
			return nil, false, err
		}
		c.conns[number], to = fresh, fresh
	}
	answer, err := to.call(request)
	if err != nil {
		to.close()
		delete(c.conns, number)
	}
	return answer, true, err
}
